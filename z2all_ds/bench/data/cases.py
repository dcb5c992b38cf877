"""What `z2all bench data` measures: every case with the job that its process gets."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from z2all_ds.bench.data.inputs import Inputs, LargeCorpus
from z2all_ds.tokenizer.tokenization_z2all import TOKENIZER_FILE

SEQUENCE_LENGTH = 2048
MICRO_BATCH = 8
NUM_LANES = 64
NUM_LANES_AT_SCALE = 256
PARTS_AT_SCALE = (0.01, 0.5, 0.99)
WARM_UP_EPOCHS = 0.1
TOKENS_TO_READ = 60_000_000
"""Of token shards, epoch after epoch: a single one of the default text would be over too soon to be timed."""
OURS = "ours"
ALONE = {"tokenizer alone": False, "tokenizer alone, mixed": True}
"""Name -> whether the documents come in random order. The tokenizer remembers only the first words that it meets: in
random order these are the frequent ones of all domains, which makes it up to a tenth faster."""
PEER_SOURCES = {"hf_datasets": ("tokens",), "mosaic_streaming": ("tokens", "raw")}
"""What each peer has to write in a form of its own."""


@dataclass(frozen=True)
class Case:
    """One thing to measure: a process and its job."""

    name: str
    by: str
    """`ours`, or the script of a peer."""
    job: dict[str, Any]


class Cases:
    """All cases on one set of inputs."""

    def __init__(self, inputs: Inputs, scratch: Path) -> None:
        self._inputs, self._scratch = inputs, scratch
        self.samples_written: dict[tuple[str, str], int] = {}
        """(peer, source) -> rows in its own form."""

    def prepare(self, peer: str, source: str) -> Case:
        return Case(f"preparing {source}", peer, {**self._peer_job(peer, source), "task": "prepare"})

    def speed(self) -> list[Case]:
        inputs, read = self._inputs, self._our_speed_job
        alone = {**self._our_job(), "task": "tokenizer_alone", "files": self._files("parquet")}
        cases = [
            *(Case(name, OURS, {**alone, "mixed": mixed}) for name, mixed in ALONE.items()),
            Case("raw jsonl", OURS, read(inputs.jsonl, 1)),
            Case("raw parquet", OURS, read(inputs.parquet, 1)),
            Case("raw parquet, one row group", OURS, {**read(inputs.parquet_one_group, 1), "weights": None}),
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
            cases.append(Case(name, peer, {**self._peer_job(peer, source), "task": "speed", "epochs": epochs}))
        return cases

    def resume(self) -> list[Case]:
        """Without a task: each is first to read half an epoch for a state, then to go on from it."""
        cases = [
            Case("raw jsonl, shuffled", OURS, {**self._our_job(), "corpus": str(self._inputs.jsonl)}),
            Case("tokens, shuffled", OURS, {**self._our_job(), "corpus": str(self._inputs.tokens)}),
        ]
        for name, peer, source, shuffle in (
            ("raw jsonl, shuffled", "hf_datasets", "jsonl", True),
            ("raw jsonl, in order", "hf_datasets", "jsonl", False),
            ("raw mds, shuffled", "mosaic_streaming", "raw", True),
            ("tokens, streamed, shuffled", "hf_datasets", "tokens", True),
            ("tokens, streamed, in order", "hf_datasets", "tokens", False),
            ("tokens, shuffled", "mosaic_streaming", "tokens", True),
        ):
            cases.append(Case(name, peer, {**self._peer_job(peer, source), "shuffle": shuffle}))
        half = self._batches(0.5)
        return [
            Case(case.name, case.by, {**case.job, "batches": half, "state_file": str(self._scratch / f"state_{n}")})
            for n, case in enumerate(cases)
        ]

    def scale(self, large: LargeCorpus) -> list[Case]:
        sizes = {"num_lanes": NUM_LANES_AT_SCALE, "num_tokens": large.num_tokens, "weights": None}
        common = {**self._our_job(), **sizes, "task": "far_in"}
        return [
            Case(f"{name} at {part:.0%}", OURS, {**common, "corpus": str(folder), "part": part})
            for name, folder in (("raw jsonl", large.raw), ("tokens", large.tokens))
            for part in PARTS_AT_SCALE
        ]

    @property
    def _token_epochs(self) -> int:
        """Fewer for little text: a test wants to be done."""
        return max(1, min(TOKENS_TO_READ // self._inputs.num_tokens, self._inputs.text_bytes // 4_000_000))

    def _batches(self, epochs: float) -> int:
        return int(epochs * self._inputs.num_tokens) // (MICRO_BATCH * SEQUENCE_LENGTH)

    def _our_job(self) -> dict[str, Any]:
        return {
            "tokenizer": str(self._inputs.tokenizer),
            "sequence_length": SEQUENCE_LENGTH,
            "micro_batch": MICRO_BATCH,
            "num_lanes": NUM_LANES,
            # By size, Chinese would get more tokens than it has in an epoch, and others fewer: another text.
            "weights": self._inputs.tokens_by_domain,
        }

    def _our_speed_job(self, corpus: Path, epochs: int) -> dict[str, Any]:
        warm_up = self._batches(WARM_UP_EPOCHS)
        often = {"batches": self._batches(epochs) + warm_up, "warm_up": warm_up}
        return {**self._our_job(), **often, "task": "speed", "corpus": str(corpus)}

    def _peer_job(self, peer: str, source: str) -> dict[str, Any]:
        inputs, stored = self._inputs, source.removesuffix("_map")
        return {
            "source": source,
            "files": self._files("jsonl" if source == "jsonl" else "parquet"),
            "text_field": "content",
            "folder": str(self._scratch / f"{peer}_{stored}"),
            "tokens_file": str(inputs.plain_tokens),
            "dtype": inputs.dtype,
            "tokenizer_file": str(inputs.tokenizer / TOKENIZER_FILE),
            "eot_id": inputs.eot_id,
            "sequence_length": SEQUENCE_LENGTH,
            "micro_batch": MICRO_BATCH,
            "samples": self.samples_written.get((peer, stored), 0),
            "epochs": 1,
            "shuffle": True,
        }

    def _files(self, form: str) -> list[str]:
        folder = self._inputs.jsonl if form == "jsonl" else self._inputs.parquet
        return [str(path) for path in sorted(folder.glob(f"*.{form}"))]
