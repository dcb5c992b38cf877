"""`z2all plan --sweep`: the curve as table, JSON and picture."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

from z2all_ds.base.config import RunConfig
from z2all_ds.base.console import say
from z2all_ds.plan.assumptions import assumptions
from z2all_ds.plan.fleet import Wishes, make_fleet
from z2all_ds.plan.outlook import Risks
from z2all_ds.plan.report import between, console_for, print_whole
from z2all_ds.plan.scaling import Point, Sweep, check_picture, draw, parse_sweep, sweep


def show_sweep(
    run: RunConfig, wishes: Wishes, asked: str, tokens: int | None, risks: Risks, out: Path | None, as_json: bool
) -> None:
    sizes = parse_sweep(asked)
    if out:
        check_picture(out)
    fleet = make_fleet(largest_of(wishes, sizes), "--sweep gpus=")
    train = run.train
    budget = tokens or train.steps * train.global_batch * train.sequence_length
    swept = sweep(run, fleet, sizes, budget, risks)
    rows = [points[-1].of for points in swept.points.values() if points]
    told = (
        f"{budget / 1e9:,.1f} B tokens. The batch stays near {train.global_batch} samples while each GPU has"
        f" {train.micro_batch} of them, and grows from there on.",
        *assumptions(run, fleet, rows, True, risks),
        *missing(run, swept),
    )
    if as_json:
        print(to_json(swept, told))
    else:
        render_sweep(swept, told)
    if out:
        say(f"drew {draw(swept, out)}")


def largest_of(wishes: Wishes, sizes: list[int]) -> Wishes:
    """For the largest of the fleets, so that all that is assumed about it is told."""
    return replace(wishes, gpus=max(sizes))


def missing(run: RunConfig, swept: Sweep) -> list[str]:
    """Which JSONs have no point at some size, and why."""
    told = []
    for name, points in swept.points.items():
        lacking = [f"{size:,}" for size in swept.sizes if size not in [point.gpus for point in points]]
        if lacking:
            also = ", or is one machine, where it has no use" if name == "zero3_hpz" else ""
            told.append(
                f"{name} is left out on {', '.join(lacking)} GPUs: it does not fit with micro-batches of"
                f" {run.train.micro_batch}, or is for another dtype than the GPU's{also}."
            )
    return told


def to_json(swept: Sweep, assumed: tuple[str, ...]) -> str:
    document = {
        "points": {name: [_point(point) for point in points] for name, points in swept.points.items()},
        "sending_takes_over_at": {name: swept.takes_over(name) for name in swept.points},
        "assumptions": assumed,
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _point(point: Point) -> dict[str, object]:
    time = point.of.time
    assert time is not None
    return {
        "gpus": point.gpus,
        "tokens_per_step": point.of.tokens_per_step,
        "accumulation": point.of.resolved.accumulation,
        "memory_bytes": point.of.memory.total,
        "sent_bytes": point.of.sent,
        "step_seconds": {**asdict(time), "least": time.least, "most": time.most},
        "efficiency": point.efficiency,
        "outlook": asdict(point.outlook),
    }


def render_sweep(swept: Sweep, assumed: tuple[str, ...], file: TextIO | None = None) -> None:
    """A row per size of fleet, three columns per JSON."""
    from rich import box
    from rich.table import Table

    console = console_for(file)
    table = Table(
        title="Share of a step in which GPUs compute, days, and goodput under failures",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("GPUs", justify="right")
    table.add_column("tokens\na step", justify="right", no_wrap=True)
    names = [name for name, points in swept.points.items() if points]
    for name in names:
        for heading in (f"{name}\ncompute", "\ndays", "\ngoodput"):
            table.add_column(heading, justify="right", no_wrap=True)
    for size in swept.sizes:
        at_size = {name: next((p for p in swept.points[name] if p.gpus == size), None) for name in names}
        tokens = next((point.of.tokens_per_step for point in at_size.values() if point), None)
        cells = [f"{size:,}", f"{tokens / 1e6:,.1f} M" if tokens else "-"]
        for point in at_size.values():
            cells += _sweep_cells(point) if point else ["-"] * 3
        table.add_row(*cells)
    print_whole(console, table)
    for name in names:
        first = swept.takes_over(name)
        told = f"from {first:,} GPUs on" if first else "on none of these"
        console.print(f"{name}: sending takes longer than computing {told}.", markup=False, soft_wrap=True)
    console.print("Assumed:", markup=False, soft_wrap=True)
    for assumption in assumed:
        console.print(f"- {assumption}", markup=False, soft_wrap=True)


def _sweep_cells(point: Point) -> list[str]:
    low, high = (f"{100 * share:.0f}" for share in point.efficiency)
    return [
        f"{low}%" if low == high else f"{low}-{high}%",
        between(point.outlook.days),
        f"{point.outlook.goodput:.1%}",
    ]
