"""The figures of `z2all bench data` for people."""

from collections.abc import Callable

from z2all_ds.base.console import human_bytes
from z2all_ds.base.reports import Shown, Table
from z2all_ds.bench.data import DataCosts
from z2all_ds.bench.data.runner import Figures, Measured


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
