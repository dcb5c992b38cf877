"""The figures of `z2all bench data` for people and for programs."""

import json
from collections.abc import Iterator
from dataclasses import asdict

from z2all_ds.base.console import human_bytes
from z2all_ds.bench.data import DataCosts
from z2all_ds.bench.data.runner import Measured


def to_json(costs: DataCosts) -> str:
    return json.dumps(asdict(costs), indent=2, ensure_ascii=False)


def to_lines(costs: DataCosts) -> Iterator[str]:
    """For people."""
    mix = ", ".join(f"{name} {100 * part:.0f}%" for name, part in costs.mix.items())
    yield (
        f"{costs.text_bytes / 1e6:,.0f} MB of text ({mix}), {costs.documents:,} documents, {costs.num_tokens:,} tokens "
        f"of a vocabulary of {costs.tokenizer_size:,}; batches of {costs.micro_batch} x {costs.sequence_length}; "
        f"one core of {costs.cores} ({costs.machine}); the middle of {costs.repeats}"
    )
    yield ""
    yield "tokens per second of one core"
    for one in costs.speed:
        yield _row(one, _rate(one))
    yield ""
    yield "resume at half an epoch: seconds to the first batch, once all is imported"
    for one in costs.resume:
        yield _row(one, _resumed(one))
    if costs.scale:
        yield ""
        size = f"{costs.scale_shards:,} shards, {costs.scale_bytes / 1e9:,.1f} GB"
        yield f"a corpus of {size}: from opening it to the first batch"
        for one in costs.scale:
            yield _row(one, _far_in(one))
    yield ""
    yield "ratios; above 1 ours is better"
    for name, ratio in costs.ratios.items():
        yield f"  {name:66} {ratio:8.2f}"


def _row(one: Measured, figures: str) -> str:
    return f"  {one.by:17} {one.name:28} " + (f"failed: {one.failed}" if one.failed else figures)


def _rate(one: Measured) -> str:
    if one.failed:
        return ""
    rate, by_clock = one.figures["tokens_per_cpu_second"], one.figures["tokens_per_second"]
    return f"{rate / 1e6:8.3f} M, {by_clock / 1e6:.3f} M by the clock"


def _resumed(one: Measured) -> str:
    if one.failed:
        return ""
    same = "the batch that was to come" if one.figures["exact"] else "another batch than was to come"
    size = human_bytes(one.figures["state_bytes"])
    return f"{one.figures['seconds']:8.3f} s, {one.figures['cpu_seconds']:.3f} s of CPU, state {size}, {same}"


def _far_in(one: Measured) -> str:
    if one.failed:
        return ""
    figures = one.figures
    return (
        f"{figures['first_batch_seconds']:8.3f} s (opening {figures['open_seconds']:.3f} s), every lane once "
        f"{figures['all_lanes_seconds']:.2f} s, peak {human_bytes(figures['peak_memory_bytes'])}, "
        f"state {human_bytes(figures['state_bytes'])}"
    )
