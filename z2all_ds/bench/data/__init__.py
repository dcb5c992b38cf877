"""`z2all bench data`: how fast batches come out of the data stream on one core, and how soon after a resume.

One run measures everything on the same documents with the same tokenizer, each case in a process of its own that is
bound to one core: our loader, only the tokenizer, which no reader of raw text can outrun, and other loaders (`peers/`),
each in its fastest variant. Our loader makes five columns of a batch, the peers two. Repeats alternate between cases,
and the median is reported. Peers read whole epochs. Our stream has no end, so it first reads a tenth of an epoch
without being timed, and then as much as the peers. Figures are per second of CPU time, which depends less on other load
than wall-clock time.
"""

import os
import platform
from collections.abc import Callable
from pathlib import Path

from z2all_ds.base.console import human_bytes
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.reports import Shown, Table
from z2all_ds.bench.data.cases import MICRO_BATCH, NUM_LANES, SEQUENCE_LENGTH, Cases, Measured, Runner
from z2all_ds.bench.data.inputs import make_large_corpus, prepare_inputs
from z2all_ds.bench.peers import environments
from z2all_ds.bench.peers.measuring import Figures
from z2all_ds.bench.shared import Report, require_at_least, scratch_folder
from z2all_ds.tokenizer import load_tokenizer


def bench_data(
    corpus: Path | None,
    tokenizer: Path | None,
    megabytes: int,
    repeats: int,
    with_peers: bool,
    peers_folder: Path | None,
    scale_shards: int,
    scale_shard_megabytes: int,
) -> Report:
    """Write the documents in every format to a temporary folder, and read them with every loader.

    `scale_shards` 0 skips the large corpus. `peers_folder`: environment of the peers, created if missing. A resume is
    `exact` if its first batch is the one that an uninterrupted run would have read.
    """
    require_at_least(1, megabytes=megabytes, repeats=repeats, shard_megabytes=scale_shard_megabytes)
    require_at_least(0, shards=scale_shards)
    if tokenizer is not None:
        load_tokenizer(tokenizer)
    with scratch_folder() as folder:
        inputs = prepare_inputs(folder, corpus, tokenizer, megabytes * 1_000_000)
        if inputs.num_tokens < 4 * MICRO_BATCH * SEQUENCE_LENGTH:
            rule = f"half an epoch must be at least two batches of {MICRO_BATCH} x {SEQUENCE_LENGTH} tokens"
            raise ConfigError(f"{inputs.num_tokens:,} tokens of text", rule, "Give more text.")
        cases = Cases(inputs, folder)
        runner = Runner(folder, peers_folder or environments.default_folder(), repeats)
        if with_peers:
            runner.prepare_peers(cases)
        speed, resume = runner.measure("speed", cases.speed()), runner.measure_resume(cases.resume())
        shard_bytes = scale_shard_megabytes * 1_000_000
        large = make_large_corpus(folder, inputs, scale_shards, shard_bytes) if scale_shards else None
        return {
            "text_bytes": inputs.text_bytes,
            "documents": inputs.documents,
            "mix": inputs.mix,
            "num_tokens": inputs.num_tokens,
            "tokenizer_size": load_tokenizer(inputs.tokenizer).size,
            "sequence_length": SEQUENCE_LENGTH,
            "micro_batch": MICRO_BATCH,
            "num_lanes": NUM_LANES,
            "repeats": repeats,
            "cores": len(os.sched_getaffinity(0)),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "packages": runner.packages,
            "speed": speed,
            "resume": resume,
            "scale": runner.measure("scale", cases.scale(large)) if large else [],
            "scale_shards": scale_shards,
            "scale_bytes": large.bytes if large else 0,
        }


def describe(report: Report) -> Shown:
    """Yield the settings, and tables of speeds, of resumes and of the large corpus."""
    mix = ", ".join(f"{name} {share:.0%}" for name, share in report["mix"].items())
    text = f"{report['text_bytes'] / 1e6:,.0f} MB of text ({mix}), {report['documents']:,} documents"
    tokens = f"{report['num_tokens']:,} tokens, vocabulary of {report['tokenizer_size']:,}"
    batches = f"batches of {report['micro_batch']} x {report['sequence_length']}"
    machine = f"one core of {report['cores']} ({report['machine']})"
    yield f"{text}, {tokens}; {batches}; {machine}; median of {report['repeats']}"
    yield "\nmillion tokens per second of one core"
    yield Table(("loader", "reads", "by CPU time", "by wall-clock time"), _rows(report["speed"], _speed_cells), "llr")
    yield "\nresume at half an epoch: seconds to the first batch, without imports"
    yield Table(("loader", "reads", "seconds", "state", "exact"), _rows(report["resume"], _resume_cells), "llr")
    if report["scale"]:
        size = f"{report['scale_shards']:,} shards, {report['scale_bytes'] / 1e9:,.1f} GB"
        yield f"\nresume in a corpus of {size}: seconds from opening it"
        names = ("loader", "reads", "first batch", "every lane once", "peak memory", "state")
        yield Table(names, _rows(report["scale"], _scale_cells), "llr")


def _rows(measured: list[Measured], cells: Callable[[Figures], list[str]]) -> list[list[str]]:
    return [[one.by, one.name, *([f"failed: {one.failed}"] if one.failed else cells(one.figures))] for one in measured]


def _speed_cells(figures: Figures) -> list[str]:
    return [f"{figures[name] / 1e6:.3f}" for name in ("tokens_per_cpu_second", "tokens_per_second")]


def _resume_cells(figures: Figures) -> list[str]:
    return [f"{figures['seconds']:.3f}", human_bytes(figures["state_bytes"]), "yes" if figures["exact"] else "no"]


def _scale_cells(figures: Figures) -> list[str]:
    seconds = [f"{figures[name]:.3f}" for name in ("first_batch_seconds", "all_lanes_seconds")]
    return [*seconds, human_bytes(figures["peak_memory_bytes"]), human_bytes(figures["state_bytes"])]
