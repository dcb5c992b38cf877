"""`z2all plan --sweep`: the same run on fleets of several sizes, as table, JSON and picture.

The global batch stays the same while every GPU has a micro-batch of it, and grows for larger fleets.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from z2all_ds.base.config import RunConfig
from z2all_ds.base.console import say
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.outputs import check_plot, write_plot
from z2all_ds.base.reports import Table, print_report
from z2all_ds.plan.choose import runs_on, with_json
from z2all_ds.plan.estimate import Estimate, StepTime, estimate
from z2all_ds.plan.fleet import Fleet, Wishes, make_fleet
from z2all_ds.plan.outlook import Outlook, Risks, look_ahead
from z2all_ds.plan.report import assumed_lines, assumptions, percent_range, span

SWEPT = ("zero1", "zero2", "zero3", "zero3_hpz")
MOST_GPUS = 1_000_000


@dataclass(frozen=True)
class Point:
    """One JSON on one size of fleet."""

    gpus: int
    of: Estimate
    time: StepTime
    outlook: Outlook

    @property
    def efficiency(self) -> tuple[float, float]:
        """Return the share of a step in which GPUs compute: (at least, at most)."""
        return self.time.compute / self.time.most, self.time.compute / self.time.least


@dataclass(frozen=True)
class Sweep:
    """Points of each JSON, the smallest fleet first. A JSON that does not fit has no point."""

    sizes: tuple[int, ...]
    points: dict[str, tuple[Point, ...]]

    def takes_over(self, name: str) -> int | None:
        """Return the smallest fleet on which sending takes longer than computing, if any."""
        slow = (one.gpus for one in self.points[name] if one.time.hidden + one.time.exposed > one.time.compute)
        return next(slow, None)


def parse_sweep(text: str) -> list[int]:
    """Return the sizes of `gpus=8,64,512`."""
    name, equals, numbers = text.partition("=")
    sizes = [int(part) if re.fullmatch(r"\s*[0-9]{1,9}\s*", part) else 0 for part in numbers.split(",")]
    if name.strip() != "gpus" or not equals or not all(0 < size <= MOST_GPUS for size in sizes):
        rule = f"must read gpus=N,N,... with numbers from 1 to {MOST_GPUS:,}"
        raise ConfigError(f"--sweep {text}", rule, "For example --sweep gpus=8,64,512,4096.")
    return sorted(set(sizes))


def sweep(run: RunConfig, fleet: Fleet, sizes: Sequence[int], tokens: int, risks: Risks) -> Sweep:
    """Estimate the run on fleets like `fleet` of each size."""
    if fleet.peak is None:
        raise ConfigError("--sweep", "needs the speed of a GPU", "Give --gpu, e.g. --gpu h100, or --peak-tflops.")
    per_node = fleet.network.gpus_per_node
    for size in sizes:
        if size > per_node and size % per_node:
            rule = f"must be whole machines of {per_node}"
            raise ConfigError(f"--sweep gpus={size}", rule, "Give --gpus-per-node, or other sizes.")
    names = SWEPT if fleet.has_bf16 else ("zero1_fp16", *SWEPT)
    points: dict[str, tuple[Point, ...]] = {}
    for name in names if run.deepspeed in names else (*names, run.deepspeed):
        row = []
        for size in sizes:
            if name == "zero3_hpz" and size <= per_node:
                continue
            of = estimate(at_size(with_json(run, name), size), fleet.of_size(size))
            outlook = look_ahead(of, tokens, risks)
            if of.fits and runs_on(of) and of.time and outlook:
                row.append(Point(size, of, of.time, outlook))
        points[name] = tuple(row)
    return Sweep(tuple(sizes), points)


def at_size(run: RunConfig, gpus: int) -> RunConfig:
    """Return the run with the nearest global batch that is a multiple of the micro-batches of all GPUs."""
    once = gpus * run.train.micro_batch
    times = max(1, round(run.train.global_batch / once))
    return run.model_copy(update={"train": run.train.model_copy(update={"global_batch": times * once})})


def show_sweep(
    run: RunConfig, wishes: Wishes, asked: str, tokens: int | None, risks: Risks, out: Path | None, as_json: bool
) -> None:
    """Print the sweep that `asked` names as table or JSON, and draw it to `out`."""
    sizes = parse_sweep(asked)
    if out:
        check_plot(out)
    # The largest fleet, whose notes cover all assumptions.
    fleet = make_fleet(replace(wishes, gpus=max(sizes)), "--sweep gpus=")
    train = run.train
    budget = tokens or train.steps * train.global_batch * train.sequence_length
    swept = sweep(run, fleet, sizes, budget, risks)
    rows = [points[-1].of for points in swept.points.values() if points]
    notes = (
        f"{budget / 1e9:,.1f} B tokens. The batch stays near {train.global_batch} samples while each GPU has"
        f" {train.micro_batch} of them, and grows from there on.",
        *assumptions(run, fleet, rows, True, risks),
        *missing(run, swept),
    )
    print_report(swept, as_json, lambda found: describe(found, notes), lambda found: content_of(found, notes))
    if out:
        say(f"drew {draw(swept, out)}")


def missing(run: RunConfig, swept: Sweep) -> list[str]:
    """Return a line with the reason for each JSON without a point at some size."""
    lines = []
    for name, points in swept.points.items():
        lacking = [f"{size:,}" for size in swept.sizes if size not in [point.gpus for point in points]]
        if lacking:
            also = ", or is one machine, where it has no use" if name == "zero3_hpz" else ""
            lines.append(
                f"{name} is left out on {', '.join(lacking)} GPUs: it does not fit with micro-batches of"
                f" {run.train.micro_batch}, or is for another dtype than the GPU's{also}."
            )
    return lines


def content_of(swept: Sweep, assumed: Sequence[str]) -> dict[str, Any]:
    """Return the content of the JSON report."""
    return {
        "points": {name: [_point(point) for point in points] for name, points in swept.points.items()},
        "sending_takes_over_at": {name: swept.takes_over(name) for name in swept.points},
        "assumptions": assumed,
    }


def _point(point: Point) -> dict[str, object]:
    return {
        "gpus": point.gpus,
        "tokens_per_step": point.of.tokens_per_step,
        "accumulation": point.of.resolved.accumulation,
        "memory_bytes": point.of.memory.total,
        "sent_bytes": point.of.sent,
        "step_seconds": point.time.to_dict(),
        "efficiency": point.efficiency,
        "outlook": point.outlook,
    }


def describe(swept: Sweep, assumed: Sequence[str]) -> Iterator[str | Table]:
    """Yield a table with a row per size of fleet and three columns per JSON, then notes."""
    yield "Share of a step in which GPUs compute, days, and goodput under failures"
    names = [name for name, points in swept.points.items() if points]
    headings = [f"{name}\n{kind}" for name in names for kind in ("compute", "days", "goodput")]
    rows = []
    for size in swept.sizes:
        found = [next((point for point in swept.points[name] if point.gpus == size), None) for name in names]
        tokens = next((point.of.tokens_per_step for point in found if point), None)
        cells = [f"{size:,}", f"{tokens / 1e6:,.1f} M" if tokens else "-"]
        for point in found:
            if point:
                cells += [percent_range(point.efficiency), span(point.outlook.days), f"{point.outlook.goodput:.1%}"]
            else:
                cells += ["-"] * 3
        rows.append(cells)
    yield Table(("GPUs", "tokens\nper step", *headings), rows, "r")
    yield ""
    for name in names:
        first = swept.takes_over(name)
        where = f"from {first:,} GPUs on" if first else "on none of these"
        yield f"{name}: sending takes longer than computing {where}."
    yield from assumed_lines(assumed)


def draw(swept: Sweep, out: Path) -> Path:
    """Draw the efficiency as a band per JSON, and the goodput under failures, over the number of GPUs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), dpi=120)
    left, right = figure.subplots(1, 2)
    for name, points in swept.points.items():
        if not points:
            continue
        sizes = [point.gpus for point in points]
        low, high = ([point.efficiency[end] for point in points] for end in (0, 1))
        (line,) = left.plot(sizes, low, marker="o", label=name)
        left.fill_between(sizes, low, high, alpha=0.2, color=line.get_color())
        right.plot(sizes, [point.outlook.goodput for point in points], marker="o", label=f"{name}, closed form")
        simulated = [point.outlook.simulated for point in points]
        right.errorbar(
            sizes, [one.goodput for one in simulated], [one.error for one in simulated], fmt="x", color=line.get_color()
        )
    left.set(xlabel="GPUs", ylabel="share of a step in which GPUs compute", ylim=(0, 1.02), xscale="log")
    right.set(xlabel="GPUs", ylabel="share of the time that counts (x: simulated)", xscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.tight_layout()
    return write_plot(figure, out)
