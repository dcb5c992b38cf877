"""`z2all bench data`: how fast batches come out of the data room on one core, and how soon after a resume.

Everything is measured in one run on the same documents with the same tokenizer, each in a process of its own that is
bound to one core. Beside ours stand the tokenizer alone, which no reader of raw text can outrun, and the loaders that
others use (`peers/`), each in the way that was fastest for it. Ours makes five columns of a batch, the peers two. All
take turns, repeat by repeat, so that a busy hour of the machine hits all alike, and the middle repeat counts. Peers
read whole epochs. Our stream has no end, and its lanes begin documents that a short run would not finish: a tenth of an
epoch goes before, which is not timed, and then as much is read as by the peers.
Figures are per second of processor time, which other work disturbs less than the clock; the clock's are there too.
"""

import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.errors import ConfigError
from z2all_ds.bench.data.cases import (
    MICRO_BATCH,
    NUM_LANES,
    OURS,
    SEQUENCE_LENGTH,
    TOKENIZER_ALONE,
    TOKENIZER_ALONE_MIXED,
    Cases,
)
from z2all_ds.bench.data.inputs import make_large_corpus, prepare_inputs
from z2all_ds.bench.data.runner import Measured, Runner
from z2all_ds.bench.peers import environments
from z2all_ds.tokenizer import load_tokenizer

DEFAULT_MEGABYTES = 60
DEFAULT_REPEATS = 3


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
        tokenizer_size = load_tokenizer(inputs.tokenizer).size
        cases, runner = Cases(inputs, folder), Runner(folder, environment, repeats)
        if with_peers:
            runner.prepare_peers(cases)
        speed = runner.measure("speed", cases.speed())
        resume = runner.measure_resume(cases.resume())
        scale: list[Measured] = []
        large = None
        if scale_shards:
            large = make_large_corpus(folder, inputs, scale_shards, scale_shard_megabytes * 1_000_000)
            scale = runner.measure("scale", cases.scale(large))
    return DataCosts(
        text_bytes=inputs.text_bytes,
        documents=inputs.documents,
        mix=inputs.mix,
        num_tokens=inputs.num_tokens,
        tokenizer_size=tokenizer_size,
        sequence_length=SEQUENCE_LENGTH,
        micro_batch=MICRO_BATCH,
        num_lanes=NUM_LANES,
        repeats=repeats,
        cores=len(os.sched_getaffinity(0)),
        machine=platform.machine(),
        python=platform.python_version(),
        packages=runner.packages,
        speed=speed,
        resume=resume,
        scale=scale,
        scale_shards=large.shards if large else 0,
        scale_bytes=large.bytes if large else 0,
        ratios=ratios_of(speed, resume),
    )


def ratios_of(speed: Sequence[Measured], resume: Sequence[Measured]) -> dict[str, float]:
    """Ours beside the tokenizer alone, and beside each peer that reads the like."""
    rates = {(one.by, one.name): one.figures["tokens_per_cpu_second"] for one in speed if not one.failed}
    seconds = {(one.by, one.name): one.figures["seconds"] for one in resume if not one.failed}
    found = {}
    for alone in (TOKENIZER_ALONE, TOKENIZER_ALONE_MIXED):
        for name in ("raw jsonl", "raw parquet", "raw parquet, one row group"):
            if (OURS, name) in rates and (OURS, alone) in rates:
                found[f"speed, {name} / {alone}"] = rates[OURS, name] / rates[OURS, alone]
    for (by, name), rate in rates.items():
        mine = "raw jsonl" if name == "raw mds" else name.split(",")[0]
        if by != OURS and (OURS, mine) in rates:
            found[f"speed, {mine} / {by} {name}"] = rates[OURS, mine] / rate
    for (by, name), took in seconds.items():
        mine = "raw jsonl, shuffled" if name.startswith("raw") else "tokens, shuffled"
        if by != OURS and (OURS, mine) in seconds:
            found[f"resume, {by} {name} / {mine}"] = took / seconds[OURS, mine]
    return found
