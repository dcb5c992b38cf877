"""The preflight for people: what is wrong first, then how fast the pairs are."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TextIO

from z2all_ds.cluster import doctor
from z2all_ds.cluster.agents.connections import Speed
from z2all_ds.cluster.preflight.checks import Preflight
from z2all_ds.cluster.preflight.health_rules import Turn
from z2all_ds.cluster.preflight.health_run import Health


def to_json(result: Preflight) -> str:
    """For programs: findings, places, the health test with its device, and the speed of every pair."""
    health = result.health
    content = {
        "seconds": round(result.seconds, 2),
        "findings": [asdict(finding) for finding in result.findings],
        "lost": sorted(result.lost),
        "places": {name: asdict(place) for name, place in result.places.items()},
        "health": {**asdict(health), "device": health_device(health)} if health else None,
        "pairs": [{"from": who, "to": whom, **asdict(speed)} for (who, whom), speed in result.speeds.items()],
    }
    return json.dumps(content, indent=2, ensure_ascii=False)


def health_device(health: Health) -> str | None:
    """cpu or cuda, by the test's own word, which it gives where nothing failed. Counts of GPUs would not do: torch may
    be a CPU build on a node that has some."""
    said = [re.match(r"\d+ nodes on (cpu|cuda): ", finding.value) for finding in health.findings]
    return next((word[1] for word in said if word), None)


def render(result: Preflight, file: TextIO | None = None) -> None:
    doctor.render(result.findings, file)
    if result.speeds:
        _matrix(result, "microseconds there and back", lambda speed: f"{speed.latency_us:.0f}", file)
        _matrix(result, "Gbit/s from row to column", lambda speed: f"{speed.gigabits_out:.1f}", file)
    if result.health and result.health.turns:
        _health_table(result.health, result.places, file)
    from rich.console import Console

    Console(file=file, highlight=False).print(f"looked at in {result.seconds:.1f} s")


def _matrix(result: Preflight, title: str, shown: Callable[[Speed], str], file: TextIO | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    names = list(result.places)
    for column in ("", *names):
        table.add_column(column, no_wrap=True, justify="right")
    for who in names:
        cells = []
        for whom in names:
            speed = result.speeds.get((who, whom))
            cells.append("" if who == whom else shown(speed) if speed else "[red]no way[/red]")
        table.add_row(who, *cells)
    Console(file=file, highlight=False).print(table)


def _health_table(health: Health, places: Iterable[str], file: TextIO | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title="ms a matmul, GB/s of all-gathers", title_justify="left")
    rounds = sorted({turn.round for turn in health.turns})
    for column in ("", "matmul", *(f"round {number}" for number in rounds)):
        table.add_column(column, no_wrap=True, justify="right")
    for name in sorted({turn.node for turn in health.turns}, key=list(places).index):
        own = {turn.round: turn for turn in health.turns if turn.node == name}
        best = min((turn.matmul_ms for turn in own.values() if turn.matmul_ms is not None), default=None)
        cells = [_meeting(own.get(number)) for number in rounds]
        table.add_row(name, "[red]failed[/red]" if best is None else f"{best:.2f}", *cells)
    Console(file=file, highlight=False).print(table)


def _meeting(turn: Turn | None) -> str:
    if turn is None:
        return "rests"
    told = "[red]failed[/red]" if turn.gather_gbps is None else f"{turn.gather_gbps:.3g}"
    return f"{told} {turn.partner}"
