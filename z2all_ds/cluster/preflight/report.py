"""The result of a preflight: what is wrong first, then how fast the pairs are."""

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from z2all_ds.base.reports import Cell, Shown, Table
from z2all_ds.cluster import doctor
from z2all_ds.cluster.agents.connections import Speed
from z2all_ds.cluster.preflight.checks import Preflight
from z2all_ds.cluster.preflight.health_rules import Turn
from z2all_ds.cluster.preflight.health_run import Health


def content_of(result: Preflight) -> dict[str, Any]:
    """Returns findings, places, the health test with its device, and the speed of every pair, for JSON."""
    health = result.health
    return {
        "seconds": round(result.seconds, 2),
        "findings": result.findings,
        "lost": sorted(result.lost),
        "places": result.places,
        "health": {**asdict(health), "device": health_device(health)} if health else None,
        "pairs": [{"from": who, "to": whom, **asdict(speed)} for (who, whom), speed in result.speeds.items()],
    }


def health_device(health: Health) -> str | None:
    """cpu or cuda, by the test's own word, which it gives where nothing failed. Counts of GPUs would not do: torch may
    be a CPU build on a node that has some."""
    said = [re.match(r"\d+ nodes on (cpu|cuda): ", finding.value) for finding in health.findings]
    return next((word[1] for word in said if word), None)


def describe(result: Preflight) -> Shown:
    """Yields the findings, a matrix of delays, one of speeds, and the health test."""
    yield from doctor.describe(result.findings)
    if result.speeds:
        yield from _matrix(result, "microseconds there and back", lambda speed: f"{speed.latency_us:.0f}")
        yield from _matrix(result, "Gbit/s from row to column", lambda speed: f"{speed.gigabits_out:.1f}")
    if result.health and result.health.turns:
        yield from _health_table(result.health, result.places)
    yield f"looked at in {result.seconds:.1f} s"


def _matrix(result: Preflight, title: str, shown: Callable[[Speed], str]) -> Shown:
    def cell(who: str, whom: str) -> Cell:
        speed = result.speeds.get((who, whom))
        return "" if who == whom else shown(speed) if speed else ("no way", "red")

    names = list(result.places)
    yield title
    yield Table(("", *names), [(who, *(cell(who, whom) for whom in names)) for who in names])


def _health_table(health: Health, places: Iterable[str]) -> Shown:
    rounds = sorted({turn.round for turn in health.turns})
    rows: list[list[Cell]] = []
    for name in sorted({turn.node for turn in health.turns}, key=list(places).index):
        own = {turn.round: turn for turn in health.turns if turn.node == name}
        best = min((turn.matmul_ms for turn in own.values() if turn.matmul_ms is not None), default=None)
        cells = [_meeting(own.get(number)) for number in rounds]
        rows.append([name, ("failed", "red") if best is None else f"{best:.2f}", *cells])
    yield "ms per matmul, GB/s of all-gathers"
    yield Table(("", "matmul", *(f"round {number}" for number in rounds)), rows)


def _meeting(turn: Turn | None) -> Cell:
    if turn is None:
        return "rests"
    if turn.gather_gbps is None:
        return f"failed {turn.partner}", "red"
    return f"{turn.gather_gbps:.3g} {turn.partner}"
