"""`z2all bench data`: how fast batches come out of the data room on one core, and how soon after a resume.

Everything is measured in one run on the same documents with the same tokenizer, each in a process of its own that is
bound to one core. Beside ours stand the tokenizer alone, which no reader of raw text can outrun, and the loaders that
others use (`peers/`), each in the way that was fastest for it. Ours makes five columns of a batch, the peers two. All
take turns, repeat by repeat, so that a busy hour of the machine hits all alike, and the middle repeat counts. The first
tenth of the batches of each is not timed: lanes, buffers and threads fill up then, which a run of days does not notice.
Figures are per second of processor time, which other work disturbs less than the clock; the clock's are there too.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from z2all_ds.bench.data_inputs import Inputs, LargeCorpus, make_large_corpus, prepare_inputs
from z2all_ds.bench.data_process import peer_script, script
from z2all_ds.bench.peers import environments
from z2all_ds.bench.peers.measuring import ONE_THREAD
from z2all_ds.console import progress, say
from z2all_ds.errors import ConfigError, MachineError
from z2all_ds.tokenizer import load_tokenizer

DEFAULT_MEGABYTES = 60
DEFAULT_REPEATS = 3
SEQUENCE_LENGTH = 2048
MICRO_BATCH = 8
NUM_LANES = 64
NUM_LANES_AT_SCALE = 256
PARTS_AT_SCALE = (0.01, 0.5, 0.99)
TOKENS_TO_READ = 60_000_000
"""Of token shards, epoch after epoch: a single one of the default text would be over too soon to be timed."""
WARM_UP_PART = 10
TOKENIZER_ALONE = "tokenizer alone"
OURS = "ours"


@dataclass(frozen=True)
class Case:
    """One thing to measure: a process and its job."""

    name: str
    by: str
    """`ours`, or the script of a peer."""
    job: dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """A case and the middle of its repeats. A failed one has its last words and no figures."""

    name: str
    by: str
    failed: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataCosts:
    """Everything, with what is needed to run it again."""

    text_bytes: int
    documents: int
    mix: dict[str, float]
    num_tokens: int
    tokenizer_size: int
    sequence_length: int
    micro_batch: int
    num_lanes: int
    repeats: int
    cores: int
    machine: str
    python: str
    packages: dict[str, dict[str, str]]
    """By whom they are used."""
    speed: list[Measured]
    """tokens, samples, open_seconds, seconds, cpu_seconds, tokens_per_cpu_second, tokens_per_second."""
    resume: list[Measured]
    """seconds and cpu_seconds to the first batch, state_bytes, exact: it is the batch that was to come."""
    scale: list[Measured]
    """open_seconds, first_batch_seconds, all_lanes_seconds, peak_memory_bytes of a corpus of many shards."""
    scale_shards: int
    scale_bytes: int
    ratios: dict[str, float]
    """Ours over the other; of resume times the other over ours. Above 1 ours is better."""


def bench_data(
    corpus: str | Path | None = None,
    tokenizer: str | Path | None = None,
    megabytes: int = DEFAULT_MEGABYTES,
    repeats: int = DEFAULT_REPEATS,
    with_peers: bool = True,
    peers_folder: str | Path | None = None,
    scale_shards: int = 1000,
    scale_shard_megabytes: int = 100,
) -> DataCosts:
    """Writes the documents in every form, reads them in every way, and throws everything away.

    `scale_shards` 0 leaves out the large corpus. `peers_folder` is where the environment of the peers is, or is made.
    """
    for name, value in (("megabytes", megabytes), ("repeats", repeats), ("shard-megabytes", scale_shard_megabytes)):
        if value < 1:
            raise ConfigError(f"{name} {value}", "must be at least 1", "Leave it out for the default.")
    if scale_shards < 0:
        raise ConfigError(f"shards {scale_shards}", "must be 0 or more", "0 leaves the large corpus out.")
    if tokenizer is not None:
        load_tokenizer(tokenizer)
    environment = Path(peers_folder) if peers_folder else environments.default_folder()
    with tempfile.TemporaryDirectory(prefix="z2all-bench-") as scratch:
        folder = Path(scratch)
        inputs = prepare_inputs(folder, corpus, tokenizer, megabytes * 1_000_000)
        if inputs.num_tokens < 4 * MICRO_BATCH * SEQUENCE_LENGTH:
            rule = f"half an epoch must be some batches of {MICRO_BATCH} x {SEQUENCE_LENGTH} tokens"
            raise ConfigError(f"{inputs.num_tokens:,} tokens of text", rule, "Give more text.")
        bench = _Bench(inputs, folder, environment, repeats)
        if with_peers:
            bench.prepare_peers()
        speed = bench.measure("speed", bench.speed_cases())
        resume = bench.measure("resume", bench.resume_cases())
        scale: list[Measured] = []
        large = None
        if scale_shards:
            large = make_large_corpus(folder, inputs, scale_shards, scale_shard_megabytes * 1_000_000)
            scale = bench.measure("scale", bench.scale_cases(large))
    return DataCosts(
        text_bytes=inputs.text_bytes,
        documents=inputs.documents,
        mix=inputs.mix,
        num_tokens=inputs.num_tokens,
        tokenizer_size=bench.tokenizer_size,
        sequence_length=SEQUENCE_LENGTH,
        micro_batch=MICRO_BATCH,
        num_lanes=NUM_LANES,
        repeats=repeats,
        cores=len(os.sched_getaffinity(0)),
        machine=platform.machine(),
        python=platform.python_version(),
        packages=bench.packages,
        speed=speed,
        resume=resume,
        scale=scale,
        scale_shards=large.shards if large else 0,
        scale_bytes=large.bytes if large else 0,
        ratios=ratios_of(speed, resume),
    )


class _Bench:
    """The cases on one set of inputs."""

    def __init__(self, inputs: Inputs, scratch: Path, environment: Path, repeats: int) -> None:
        self._inputs, self._scratch, self._environment, self._repeats = inputs, scratch, environment, repeats
        self._core = max(os.sched_getaffinity(0))
        self._peers: list[str] = []
        """Those that can be measured."""
        self._failed: dict[str, str] = {}
        self._samples: dict[tuple[str, str], int] = {}
        """(peer, source) -> rows it has written."""
        self.tokenizer_size = load_tokenizer(inputs.tokenizer).size
        self.packages: dict[str, dict[str, str]] = {}

    # What there is to measure

    def prepare_peers(self) -> None:
        """Installs them, and lets each write the documents in its own form."""
        for peer in environments.PEERS:
            try:
                environments.make_ready(self._environment, peer)
                sources = ["tokens"] if peer == "hf_datasets" else ["tokens", "raw"]
                for source in sources:
                    figures = self._run(Case(source, peer, {"task": "prepare", **self._peer_job(peer, source)}))
                    self._samples[peer, source] = figures["samples"]
                self._peers.append(peer)
            except (environments.PeerMissing, MachineError) as error:
                self._failed[peer] = str(error)
                say(f"bench data: {peer} is left out: {error}")

    def speed_cases(self) -> list[Case]:
        inputs, read = self._inputs, self._our_speed_job
        cases = [
            Case(
                TOKENIZER_ALONE, OURS, {"task": "tokenizer_alone", "files": self._files("parquet"), **self._our_job()}
            ),
            Case("raw jsonl", OURS, read(inputs.jsonl, 1)),
            Case("raw parquet", OURS, read(inputs.parquet, 1)),
            Case("raw parquet, one row group", OURS, read(inputs.parquet_one_group, 1)),
            Case("tokens", OURS, read(inputs.tokens, self._token_epochs)),
        ]
        for name, peer, source in (
            ("raw jsonl", "hf_datasets", "jsonl"),
            ("raw parquet", "hf_datasets", "parquet"),
            ("raw mds", "mosaic_streaming", "raw"),
            ("tokens, memory-mapped", "hf_datasets", "tokens_map"),
            ("tokens, streamed", "hf_datasets", "tokens"),
            ("tokens", "mosaic_streaming", "tokens"),
        ):
            epochs = self._token_epochs if source.startswith("tokens") else 1
            often = {"task": "speed", "epochs": epochs, "warm_up": self._batches(epochs) // WARM_UP_PART}
            cases.append(Case(name, peer, {**self._peer_job(peer, source), **often}))
        return cases

    def resume_cases(self) -> list[Case]:
        """Each needs a state first, which comes from really reading half an epoch."""
        half = self._batches(0.5)
        cases = [
            Case("raw jsonl, shuffled", OURS, {**self._our_job(), "corpus": str(self._inputs.jsonl)}),
            Case("tokens, shuffled", OURS, {**self._our_job(), "corpus": str(self._inputs.tokens)}),
        ]
        for name, peer, source in (
            ("raw jsonl", "hf_datasets", "jsonl"),
            ("tokens, streamed", "hf_datasets", "tokens"),
            ("raw mds", "mosaic_streaming", "raw"),
            ("tokens", "mosaic_streaming", "tokens"),
        ):
            for shuffle in (True, False) if peer == "hf_datasets" else (True,):
                label = f"{name}, {'shuffled' if shuffle else 'in order'}"
                cases.append(Case(label, peer, {**self._peer_job(peer, source), "shuffle": shuffle}))
        return [
            Case(case.name, case.by, {**case.job, "batches": half, "state_file": str(self._scratch / f"state_{n}")})
            for n, case in enumerate(cases)
        ]

    def scale_cases(self, large: LargeCorpus) -> list[Case]:
        lanes = {"num_lanes": NUM_LANES_AT_SCALE, "num_tokens": large.num_tokens}
        return [
            Case(f"{name} at {part:.0%}", OURS,
                 {**self._our_job(), **lanes, "task": "far_in", "corpus": str(folder), "part": part})
            for name, folder in (("raw jsonl", large.raw), ("tokens", large.tokens))
            for part in PARTS_AT_SCALE
        ]  # fmt: skip

    @property
    def _token_epochs(self) -> int:
        """Few for little text: a test wants to be done."""
        return max(1, min(TOKENS_TO_READ // self._inputs.num_tokens, self._inputs.text_bytes // 4_000_000))

    def _our_job(self) -> dict[str, Any]:
        return {
            "tokenizer": str(self._inputs.tokenizer),
            "sequence_length": SEQUENCE_LENGTH,
            "micro_batch": MICRO_BATCH,
            "num_lanes": NUM_LANES,
        }

    def _our_speed_job(self, corpus: Path, epochs: int) -> dict[str, Any]:
        batches = self._batches(epochs)
        often = {"batches": batches, "warm_up": batches // WARM_UP_PART}
        return {**self._our_job(), **often, "task": "speed", "corpus": str(corpus)}

    def _batches(self, epochs: float) -> int:
        return int(epochs * self._inputs.num_tokens) // (MICRO_BATCH * SEQUENCE_LENGTH)

    def _peer_job(self, peer: str, source: str) -> dict[str, Any]:
        inputs, stored = self._inputs, source.removesuffix("_map")
        return {
            "source": source,
            "files": self._files("jsonl" if source == "jsonl" else "parquet"),
            "text_field": "content",
            "folder": str(self._scratch / f"{peer}_{stored}"),
            "tokens_file": str(inputs.plain_tokens),
            "dtype": inputs.dtype,
            "tokenizer_file": str(inputs.tokenizer_file),
            "eot_id": inputs.eot_id,
            "sequence_length": SEQUENCE_LENGTH,
            "micro_batch": MICRO_BATCH,
            "samples": self._samples.get((peer, stored), 0),
            "epochs": 1,
            "shuffle": True,
        }

    def _files(self, form: str) -> list[str]:
        folder = self._inputs.jsonl if form == "jsonl" else self._inputs.parquet
        return [str(path) for path in sorted(folder.glob(f"*.{form}"))]

    # Measuring

    def measure(self, label: str, cases: Sequence[Case]) -> list[Measured]:
        """All cases in turn, `repeats` times; of each the middle one."""
        cases = [case for case in cases if case.by in (OURS, *self._peers, *self._failed)]
        failed = {(case.by, case.name): self._failed[case.by] for case in cases if case.by in self._failed}
        expected: dict[tuple[str, str], dict[str, Any]] = {}
        found: dict[tuple[str, str], list[dict[str, Any]]] = {(case.by, case.name): [] for case in cases}
        is_resume = label == "resume"
        with progress(f"bench data, {label}", len(cases) * (self._repeats + is_resume), "measurements") as advance:
            for repeat in range(-is_resume, self._repeats):  # -1: the states to resume from
                for case in cases:
                    key = (case.by, case.name)
                    if key not in failed:
                        task = ("half" if repeat < 0 else "resume") if is_resume else case.job["task"]
                        try:
                            figures = self._run(Case(case.name, case.by, {**case.job, "task": task}))
                            if repeat < 0:
                                expected[key] = figures
                            else:
                                found[key].append(figures)
                        except MachineError as error:
                            failed[key] = str(error)
                    advance(1, f"{case.by} {case.name}")
        return [
            Measured(name, by, failed[by, name]) if (by, name) in failed
            else Measured(name, by, figures=_summary(repeats, expected.get((by, name))))
            for (by, name), repeats in found.items()
        ]  # fmt: skip

    def _run(self, case: Case) -> dict[str, Any]:
        """One process, from its start to its figures."""
        command = [sys.executable, *script()]
        if case.by != OURS:
            command = [str(environments.python_of(self._environment)), str(peer_script(case.by))]
        # Peers keep their files out of the user's caches, and must not find our packages.
        own = {name: value for name, value in os.environ.items() if case.by == OURS or name != "PYTHONPATH"}
        own |= {**ONE_THREAD, "HF_HOME": str(self._scratch / "hf_home"), "HF_HUB_OFFLINE": "1"}
        job = json.dumps({**case.job, "core": self._core})
        done = subprocess.run(command, input=job, capture_output=True, text=True, env=own, cwd=self._scratch)
        if done.returncode:
            why = f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
            fix = "Run it again; --no-peers leaves the peers out."
            raise MachineError(f"{case.by} {case.name}", f"{why}: {environments.last_words(done.stderr)}", fix)
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        self.packages[case.by] = {**self.packages.get(case.by, {}), **figures.pop("packages")}
        return figures


def _summary(repeats: list[dict[str, Any]], expected: dict[str, Any] | None) -> dict[str, Any]:
    """The middle repeat, with what follows from it."""
    by = "cpu_seconds" if "tokens" in repeats[0] else "first_batch_seconds" if expected is None else "seconds"
    middle = dict(sorted(repeats, key=lambda one: one[by])[(len(repeats) - 1) // 2])
    if "tokens" in middle:
        middle["tokens_per_cpu_second"] = middle["tokens"] / middle["cpu_seconds"]
        middle["tokens_per_second"] = middle["tokens"] / middle["seconds"]
    if expected is not None:
        middle["state_bytes"] = expected["state_bytes"]
        middle["exact"] = middle.pop("next_batch") == expected["next_batch"]
    return middle


def ratios_of(speed: Sequence[Measured], resume: Sequence[Measured]) -> dict[str, float]:
    """Ours beside the tokenizer alone, and beside each peer that reads the like."""
    rates = {(one.by, one.name): one.figures["tokens_per_cpu_second"] for one in speed if not one.failed}
    seconds = {(one.by, one.name): one.figures["seconds"] for one in resume if not one.failed}
    found = {}
    for name in ("raw jsonl", "raw parquet", "raw parquet, one row group"):
        if (OURS, name) in rates and (OURS, TOKENIZER_ALONE) in rates:
            found[f"speed, {name} / {TOKENIZER_ALONE}"] = rates[OURS, name] / rates[OURS, TOKENIZER_ALONE]
    for (by, name), rate in rates.items():
        mine = "raw jsonl" if name == "raw mds" else name.split(",")[0]
        if by != OURS and (OURS, mine) in rates:
            found[f"speed, {mine} / {by} {name}"] = rates[OURS, mine] / rate
    for (by, name), took in seconds.items():
        mine = "raw jsonl, shuffled" if name.startswith("raw") else "tokens, shuffled"
        if by != OURS and (OURS, mine) in seconds:
            found[f"resume, {by} {name} / {mine}"] = took / seconds[OURS, mine]
    return found
