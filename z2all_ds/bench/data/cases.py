"""The cases of `z2all bench data`, each with the job of its process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from z2all_ds.bench.data.inputs import Inputs, LargeCorpus

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
        """Returns the case in which a peer writes a source in its own format."""
        return self._case(f"preparing {source}", peer, source, task="prepare")

    def speed(self) -> list[Case]:
        """Returns the cases that read everything.

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
        """Returns cases whose task the runner sets: each reads half an epoch, and then resumes from there."""
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
        """Returns the cases that resume in a large corpus."""
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
