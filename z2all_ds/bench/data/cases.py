"""The cases of `z2all bench data`, and the runner that measures each in processes of its own on one core."""

import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from z2all_ds.base.child_process import SAFE_PATH, module_command, package_environment
from z2all_ds.base.console import progress, say
from z2all_ds.base.errors import MachineError
from z2all_ds.bench.data.inputs import Inputs, LargeCorpus
from z2all_ds.bench.peers import environments
from z2all_ds.bench.peers.measuring import ONE_THREAD, Figures
from z2all_ds.bench.shared import error_line, median_repeat, run_process

SEQUENCE_LENGTH = 2048
MICRO_BATCH = 8
NUM_LANES = 64
NUM_LANES_AT_SCALE = 256
PARTS_AT_SCALE = (0.01, 0.5, 0.99)
TOKENS_TO_READ = 60_000_000
"""Tokens to read from token shards, in several epochs: one epoch of the default text would be too short to time."""
OURS, HF, MOSAIC = "ours", "hf_datasets", "mosaic_streaming"
PEER_SOURCES = {HF: ("tokens",), MOSAIC: ("tokens", "raw")}
"""Sources that each peer has to write in its own format."""


@dataclass(frozen=True)
class Case:
    """A measurement: the job of a process. `by` is `ours`, or the script of a peer."""

    name: str
    by: str
    job: dict[str, Any]


class Cases:
    """All cases on one set of inputs."""

    def __init__(self, inputs: Inputs, scratch: Path) -> None:
        self._inputs, self._scratch = inputs, scratch
        self.samples_written: dict[tuple[str, str], int] = {}
        """(peer, source) -> rows in the peer's own format."""

    def prepare(self, peer: str, source: str) -> Case:
        """Return the case in which a peer writes a source in its own format."""
        return self._case(f"preparing {source}", peer, source, task="prepare")

    def speed(self) -> list[Case]:
        """Return the cases that read everything.

        The tokenizer caches only the first words that it meets. If documents are mixed, these are the frequent words of
        all domains, which makes it up to a tenth faster.
        """
        inputs = self._inputs
        # Little text, as in tests, needs fewer epochs.
        epochs = max(1, min(TOKENS_TO_READ // inputs.num_tokens, inputs.text_bytes // 4_000_000))
        return [
            self._case("tokenizer only", OURS, "parquet", task="tokenizer_only", mixed=False),
            self._case("tokenizer only, mixed", OURS, "parquet", task="tokenizer_only", mixed=True),
            self._case("raw jsonl", OURS, "jsonl"),
            self._case("raw parquet", OURS, "parquet"),
            self._case("raw parquet, one row group", OURS, "parquet_one_group", weights=None),
            self._case("tokens", OURS, "tokens", epochs=epochs),
            self._case("raw jsonl", HF, "jsonl"),
            self._case("raw parquet", HF, "parquet"),
            self._case("raw mds", MOSAIC, "raw"),
            self._case("tokens, memory-mapped", HF, "tokens", task="map_speed", epochs=epochs),
            self._case("tokens, streamed", HF, "tokens", epochs=epochs),
            self._case("tokens", MOSAIC, "tokens", epochs=epochs),
        ]

    def resume(self) -> list[Case]:
        """Return cases whose task the runner sets: each reads half an epoch, and then resumes from there."""
        cases = (
            ("raw jsonl, shuffled", OURS, "jsonl", True),
            ("tokens, shuffled", OURS, "tokens", True),
            ("raw jsonl, shuffled", HF, "jsonl", True),
            ("raw jsonl, in order", HF, "jsonl", False),
            ("raw mds, shuffled", MOSAIC, "raw", True),
            ("tokens, streamed, shuffled", HF, "tokens", True),
            ("tokens, streamed, in order", HF, "tokens", False),
            ("tokens, shuffled", MOSAIC, "tokens", True),
        )
        return [
            self._case(name, by, source, shuffle=shuffle, state_file=str(self._scratch / f"state_{number}"))
            for number, (name, by, source, shuffle) in enumerate(cases)
        ]

    def scale(self, large: LargeCorpus) -> list[Case]:
        """Return the cases that resume in a large corpus."""
        sizes = {"num_lanes": NUM_LANES_AT_SCALE, "num_tokens": large.num_tokens, "weights": None}
        return [
            self._case(f"{name} at {part:.0%}", OURS, "", task="scale", folder=str(folder), part=part, **sizes)
            for name, folder in (("raw jsonl", large.raw), ("tokens", large.tokens))
            for part in PARTS_AT_SCALE
        ]

    def _case(self, name: str, by: str, source: str, **more: Any) -> Case:
        inputs = self._inputs
        is_peers_own = source in PEER_SOURCES.get(by, ())
        job = {
            "task": "speed",
            "source": source,
            "folder": str(self._scratch / f"{by}_{source}" if is_peers_own else getattr(inputs, source, "")),
            "parquet": str(inputs.parquet),
            "tokens_file": str(inputs.plain_tokens),
            "dtype": inputs.dtype,
            "tokenizer": str(inputs.tokenizer),
            "eot_id": inputs.eot_id,
            "sequence_length": SEQUENCE_LENGTH,
            "micro_batch": MICRO_BATCH,
            "num_tokens": inputs.num_tokens,
            "samples": self.samples_written.get((by, source), 0),
            "epochs": 1,
            "shuffle": True,
            "num_lanes": NUM_LANES,
            # Weights by size would read more Chinese tokens than an epoch has, and fewer of other domains.
            "weights": inputs.tokens_by_domain,
        }
        return Case(name, by, {**job, **more})


@dataclass(frozen=True)
class Measured:
    """A case and its median repeat. A failed one has the error instead of figures."""

    name: str
    by: str
    failed: str = ""
    figures: Figures = field(default_factory=dict)


class Runner:
    """Starts the processes of all cases."""

    def __init__(self, scratch: Path, environment: Path, repeats: int) -> None:
        """`environment`: folder of the peers' environment."""
        self._scratch, self._environment, self._repeats = scratch, environment, repeats
        self._core = max(os.sched_getaffinity(0))
        self._peer_failures: dict[str, str] = {}
        """Peer -> its error, "" if it is ready."""
        self.packages: dict[str, dict[str, str]] = {}
        """Loader -> versions of its packages."""

    def prepare_peers(self, cases: Cases, peers: Iterable[str] = PEER_SOURCES) -> None:
        """Install the peers, and let each write the documents in its own format. One that fails is skipped."""
        for peer in peers:
            self._peer_failures[peer] = ""
            try:
                environments.make_ready(self._environment, peer)
                for source in PEER_SOURCES[peer]:
                    cases.samples_written[peer, source] = self.run(cases.prepare(peer, source))["samples"]
            except MachineError as error:
                self._peer_failures[peer] = str(error)
                say(f"bench data: {peer} is skipped: {error}")

    def measure(self, label: str, cases: Sequence[Case]) -> list[Measured]:
        """Run all cases `repeats` times and take the median of each."""
        return self._alternate(label, cases, [""] * self._repeats, _median)

    def measure_resume(self, cases: Sequence[Case]) -> list[Measured]:
        """Let each case read half an epoch once and resume from there `repeats` times, always in a new process."""

        def compare(found: list[Figures]) -> Figures:
            half, figures = found[0], _median(found[1:])
            exact = figures.pop("next_batch") == half["next_batch"]
            return {**figures, "state_bytes": half["state_bytes"], "exact": exact}

        return self._alternate("resume", cases, ["half", *["resume"] * self._repeats], compare)

    def run(self, case: Case) -> Figures:
        """Run one process and return its figures."""
        command = module_command("z2all_ds.bench.data.process")
        environment = {**package_environment(), **ONE_THREAD}
        if case.by != OURS:
            script = Path(environments.__file__).with_name(f"{case.by}.py")
            command = [str(environments.python_of(self._environment)), str(script)]
            for name in ("PYTHONPATH", SAFE_PATH):  # the peers have their own packages, and modules next to the script
                environment.pop(name, None)
            environment |= {"HF_HOME": str(self._scratch / "hf_home"), "HF_HUB_OFFLINE": "1"}
        done = run_process(command, {**case.job, "core": self._core}, stderr=subprocess.PIPE, env=environment)
        if done.returncode:
            rule = f"failed with exit code {done.returncode}: {error_line(done.stderr)}"
            raise MachineError(f"{case.by}, {case.name}", rule, "Run it again.")
        figures: Figures = json.loads(done.stdout.splitlines()[-1])
        self.packages.setdefault(case.by, {}).update(figures.pop("packages"))
        return figures

    def _alternate(
        self, label: str, cases: Sequence[Case], tasks: Sequence[str], summarize: Callable[[list[Figures]], Figures]
    ) -> list[Measured]:
        """Run each task of all cases before the next task; "" is the case's own. After a failure a case is skipped."""
        cases = [case for case in cases if case.by == OURS or case.by in self._peer_failures]
        found: list[list[Figures]] = [[] for _ in cases]
        failed = [self._peer_failures.get(case.by, "") for case in cases]
        with progress(f"bench data, {label}", len(cases) * len(tasks), "measurements") as advance:
            for task, (number, case) in itertools.product(tasks, enumerate(cases)):
                if not failed[number]:
                    job = {**case.job, "task": task} if task else case.job
                    try:
                        found[number].append(self.run(Case(case.name, case.by, job)))
                    except MachineError as error:
                        failed[number] = str(error)
                advance(1, f"{case.by}: {case.name}")
        return [
            Measured(case.name, case.by, why, {} if why else summarize(figures))
            for case, figures, why in zip(cases, found, failed, strict=True)
        ]


def _median(repeats: Sequence[Figures]) -> Figures:
    """Return the median repeat: of speed by CPU time, of a resume by wall-clock time."""
    by = next(name for name in ("cpu_seconds", "first_batch_seconds", "seconds") if name in repeats[0])
    figures = dict(median_repeat(repeats, by))
    if "tokens" in figures:
        figures["tokens_per_cpu_second"] = figures["tokens"] / figures["cpu_seconds"]
        figures["tokens_per_second"] = figures["tokens"] / figures["seconds"]
    return figures
