"""`z2all bench data`: how fast batches come out of the data stream on one core, and how soon after a resume.

One run measures everything on the same documents with the same tokenizer, each case in a process of its own that is
bound to one core: ours, the tokenizer alone, which no reader of raw text can outrun, and other loaders (`peers/`), each
in the way that was fastest for it. Ours makes five columns of a batch, the peers two. All take turns, and the middle
repeat counts. Peers read whole epochs. Our stream has no end, so a tenth of an epoch comes first without being timed,
and then as much is read as by the peers. Figures are per second of processor time, which other work disturbs less than
the clock; those by the clock are there too.
"""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.console import human_bytes
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.reports import Shown, Table
from z2all_ds.bench.data.cases import ALONE, MICRO_BATCH, NUM_LANES, OURS, SEQUENCE_LENGTH, Cases
from z2all_ds.bench.data.inputs import make_large_corpus, prepare_inputs
from z2all_ds.bench.data.runner import Figures, Measured, Runner
from z2all_ds.bench.peers import environments
from z2all_ds.bench.shared import require_at_least, scratch_folder
from z2all_ds.tokenizer import load_tokenizer


@dataclass(frozen=True)
class DataCosts:
    """Everything, with what is needed to run it again.

    `speed` has tokens, samples, open_seconds, seconds, cpu_seconds, tokens_per_cpu_second and tokens_per_second;
    `resume` the seconds and cpu_seconds to the first batch, state_bytes, and exact: it is the batch that was to come;
    `scale` open_seconds, first_batch_seconds, all_lanes_seconds and peak_memory_bytes of a corpus of many shards.
    `ratios` are ours over the other, of resume times the other over ours: above 1 ours is better.
    """

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
    speed: list[Measured]
    resume: list[Measured]
    scale: list[Measured]
    scale_shards: int
    scale_bytes: int
    ratios: dict[str, float]


def bench_data(
    corpus: Path | None,
    tokenizer: Path | None,
    megabytes: int,
    repeats: int,
    with_peers: bool,
    peers_folder: Path | None,
    scale_shards: int,
    scale_shard_megabytes: int,
) -> DataCosts:
    """Writes the documents in every form, reads them in every way, and deletes everything.

    `scale_shards` 0 leaves out the large corpus. `peers_folder` is where the environment of the peers is, or is made.
    """
    require_at_least(1, megabytes=megabytes, repeats=repeats, shard_megabytes=scale_shard_megabytes)
    require_at_least(0, shards=scale_shards)
    if tokenizer is not None:
        load_tokenizer(tokenizer)
    with scratch_folder() as folder:
        inputs = prepare_inputs(folder, corpus, tokenizer, megabytes * 1_000_000)
        if inputs.num_tokens < 4 * MICRO_BATCH * SEQUENCE_LENGTH:
            rule = f"half an epoch must be some batches of {MICRO_BATCH} x {SEQUENCE_LENGTH} tokens"
            raise ConfigError(f"{inputs.num_tokens:,} tokens of text", rule, "Give more text.")
        cases = Cases(inputs, folder)
        runner = Runner(folder, peers_folder or environments.default_folder(), repeats)
        if with_peers:
            runner.prepare_peers(cases)
        speed, resume = runner.measure("speed", cases.speed()), runner.measure_resume(cases.resume())
        shard_bytes = scale_shard_megabytes * 1_000_000
        large = make_large_corpus(folder, inputs, scale_shards, shard_bytes) if scale_shards else None
        return DataCosts(
            inputs.text_bytes,
            inputs.documents,
            inputs.mix,
            inputs.num_tokens,
            load_tokenizer(inputs.tokenizer).size,
            SEQUENCE_LENGTH,
            MICRO_BATCH,
            NUM_LANES,
            repeats,
            len(os.sched_getaffinity(0)),
            platform.machine(),
            platform.python_version(),
            runner.packages,
            speed,
            resume,
            runner.measure("scale", cases.scale(large)) if large else [],
            scale_shards,
            large.bytes if large else 0,
            ratios_of(speed, resume),
        )


def ratios_of(speed: Sequence[Measured], resume: Sequence[Measured]) -> dict[str, float]:
    """Returns ours over the tokenizer alone, and over each peer that reads the like."""
    rates = {(one.by, one.name): one.figures["tokens_per_cpu_second"] for one in speed if not one.failed}
    seconds = {(one.by, one.name): one.figures["seconds"] for one in resume if not one.failed}
    found = {}
    for alone in ALONE:
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


def describe(costs: DataCosts) -> Shown:
    """Yields what was read, a table of speeds, one of resumes, one of a large corpus, and the ratios."""
    mix = ", ".join(f"{name} {part:.0%}" for name, part in costs.mix.items())
    yield (
        f"{costs.text_bytes / 1e6:,.0f} MB of text ({mix}), {costs.documents:,} documents, {costs.num_tokens:,} tokens "
        f"of a vocabulary of {costs.tokenizer_size:,}; batches of {costs.micro_batch} x {costs.sequence_length}; "
        f"one core of {costs.cores} ({costs.machine}); the middle of {costs.repeats}"
    )
    yield "\nmillion tokens per second of one core"
    yield Table(("by", "reads", "by CPU time", "by the clock"), [_row(one, _rate) for one in costs.speed], "llr")
    yield "\nresume at half an epoch: seconds to the first batch, once all is imported"
    names = ["by", "reads", "seconds", "CPU seconds", "state", "batch that was to come"]
    yield Table(names, [_row(one, _resumed) for one in costs.resume], "llr")
    if costs.scale:
        size = f"{costs.scale_shards:,} shards, {costs.scale_bytes / 1e9:,.1f} GB"
        yield f"\na corpus of {size}: seconds from opening it"
        names = ["by", "reads", "first batch", "opening", "every lane once", "peak memory", "state"]
        yield Table(names, [_row(one, _far_in) for one in costs.scale], "llr")
    yield "\nratios; above 1 ours is better"
    yield Table(("", ""), [(name, f"{ratio:.2f}") for name, ratio in costs.ratios.items()])


def _row(one: Measured, cells: Callable[[Figures], list[str]]) -> list[str]:
    return [one.by, one.name, *([f"failed: {one.failed}"] if one.failed else cells(one.figures))]


def _rate(figures: Figures) -> list[str]:
    return [f"{figures[name] / 1e6:.3f}" for name in ("tokens_per_cpu_second", "tokens_per_second")]


def _resumed(figures: Figures) -> list[str]:
    seconds = [f"{figures[name]:.3f}" for name in ("seconds", "cpu_seconds")]
    return [*seconds, human_bytes(figures["state_bytes"]), "yes" if figures["exact"] else "no"]


def _far_in(figures: Figures) -> list[str]:
    seconds = [f"{figures[name]:.3f}" for name in ("first_batch_seconds", "open_seconds", "all_lanes_seconds")]
    return [*seconds, human_bytes(figures["peak_memory_bytes"]), human_bytes(figures["state_bytes"])]
