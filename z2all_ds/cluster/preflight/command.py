"""`z2all doctor --hostfile`: runs the preflight and prints its result."""

import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from z2all_ds.base.console import heartbeat
from z2all_ds.base.errors import ClusterError
from z2all_ds.base.machine import free_port
from z2all_ds.base.reports import Cell, Shown, Table, print_report
from z2all_ds.cluster import doctor, ssh
from z2all_ds.cluster.agents.connections import Speed
from z2all_ds.cluster.nodes import read_nodes
from z2all_ds.cluster.preflight.checks import Preflight, Subject, preflight
from z2all_ds.cluster.preflight.health_rules import Turn
from z2all_ds.cluster.preflight.health_run import Health


def check_nodes(hostfile: str, folder: Path, as_json: bool, health: bool = True, exclude_slow: bool = False) -> int:
    """Check all nodes and print the result; return the exit code."""
    nodes = read_nodes(hostfile)
    with tempfile.TemporaryDirectory() as temporary:
        config = ssh.write_config(nodes, Path(temporary) / "ssh_config")
        subject = Subject(nodes, config, os.getcwd(), str(folder.absolute()), [], free_port())
        with heartbeat(f"checking {len(nodes)} nodes"):
            found = preflight(subject, health, exclude_slow)
    print_report(found, as_json, describe, content_of)
    return ClusterError.exit_code if found.failures else 0


def content_of(result: Preflight) -> dict[str, Any]:
    """Return findings, data addresses, health test and the speed of every pair for JSON."""
    return {
        "seconds": round(result.seconds, 2),
        "findings": result.findings,
        "lost": sorted(result.lost),
        "places": result.addresses,
        "health": result.health,
        "pairs": [{"from": who, "to": whom, **asdict(speed)} for (who, whom), speed in result.speeds.items()],
    }


def describe(result: Preflight) -> Shown:
    """Yield the findings, a matrix of latencies, one of bandwidths, and the health test."""
    yield from doctor.describe(result.findings)
    if result.speeds:
        yield from _matrix(result, "round trip in microseconds", lambda speed: f"{speed.latency_us:.0f}")
        yield from _matrix(result, "Gbit/s from row to column", lambda speed: f"{speed.gigabits_out:.1f}")
    if result.health and result.health.turns:
        yield from _health_table(result.health, result.addresses)
    yield f"checked in {result.seconds:.1f} s"


def _matrix(result: Preflight, title: str, shown: Callable[[Speed], str]) -> Shown:
    def cell(who: str, whom: str) -> Cell:
        speed = result.speeds.get((who, whom))
        return "" if who == whom else shown(speed) if speed else ("failed", "red")

    names = list(result.addresses)
    yield title
    yield Table(("", *names), [(who, *(cell(who, whom) for whom in names)) for who in names])


def _health_table(health: Health, names: Iterable[str]) -> Shown:
    rounds = sorted({turn.round for turn in health.turns})
    rows: list[list[Cell]] = []
    for name in sorted({turn.node for turn in health.turns}, key=list(names).index):
        own = {turn.round: turn for turn in health.turns if turn.node == name}
        best = min((turn.matmul_ms for turn in own.values() if turn.matmul_ms is not None), default=None)
        cells = [_turn_cell(own.get(number)) for number in rounds]
        rows.append([name, ("failed", "red") if best is None else f"{best:.2f}", *cells])
    yield "ms per matmul, GB/s of all-gathers"
    yield Table(("", "matmul", *(f"round {number}" for number in rounds)), rows)


def _turn_cell(turn: Turn | None) -> Cell:
    if turn is None:
        return "rests"
    if turn.gather_gbps is None:
        return f"failed {turn.partner}", "red"
    return f"{turn.gather_gbps:.3g} {turn.partner}"
