"""`z2all plan --sweep`: the curve as table, JSON and picture."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from z2all_ds.config import RunConfig
from z2all_ds.console import say
from z2all_ds.plan.fleet import Wishes, make_fleet
from z2all_ds.plan.outlook import Risks
from z2all_ds.plan.report import between, console_for
from z2all_ds.plan.scaling import Point, Sweep, draw, parse_sweep, sweep


def show_sweep(
    run: RunConfig, wishes: Wishes, asked: str, tokens: int | None, risks: Risks, out: Path | None, as_json: bool
) -> None:
    sizes = parse_sweep(asked)
    fleet = make_fleet(largest_of(wishes, sizes))
    train = run.train
    budget = tokens or train.steps * train.global_batch * train.sequence_length
    swept = sweep(run, fleet, sizes, budget, risks)
    if as_json:
        print(to_json(swept))
    else:
        render_sweep(swept)
    if out:
        say(f"drew {draw(swept, out)}")


def render_sweep(swept: Sweep, file: TextIO | None = None) -> None:
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
    table.add_column("tokens\na step", justify="right")
    names = [name for name, points in swept.points.items() if points]
    for name in names:
        for heading in (f"{name}\ncompute", "\ndays", "\ngoodput"):
            table.add_column(heading, justify="right", no_wrap=True)
    for size in swept.sizes:
        at_size = {name: next((p for p in swept.points[name] if p.gpus == size), None) for name in names}
        tokens = next((point.of.tokens_per_step for point in at_size.values() if point), None)
        cells = [f"{size:,}", f"{tokens:,}" if tokens else "-"]
        for point in at_size.values():
            cells += _sweep_cells(point) if point else ["-"] * 3
        table.add_row(*cells)
    console.print(table)
    for name in names:
        size = swept.takes_over(name)
        told = f"from {size:,} GPUs on" if size else "on none of these"
        console.print(f"{name}: sending takes longer than computing {told}.", markup=False)


def _sweep_cells(point: Point) -> list[str]:
    low, high = (f"{100 * share:.0f}" for share in point.efficiency)
    return [
        f"{low}%" if low == high else f"{low}-{high}%",
        between(point.outlook.days),
        f"{point.outlook.goodput:.1%}",
    ]
