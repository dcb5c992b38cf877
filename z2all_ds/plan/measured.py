"""Figures that `z2all doctor --json` has measured, for plans that shall rest on this cluster and not on its data sheet.

Speeds of pairs are those of one plain TCP connection between two nodes, some tenths of a second long: what ethernet
gives to a single stream, and a lower bound where NCCL goes over InfiniBand or several adapters. `all_gather` is the
word of NCCL (of gloo on CPU nodes) itself, by the health test.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from z2all_ds.base.errors import ConfigError
from z2all_ds.plan.hardware import Link

MATMUL_OPERATIONS = {"cpu": 2 * 512**3, "cuda": 2 * 8192**3}
"""Of one product in the health test (`cluster/preflight/health_worker.py` has the shapes), in fp32 and bf16."""
MEASURE = "Write one: `z2all doctor FOLDER --hostfile H --json > FILE`, or without --hostfile for this machine alone."


@dataclass(frozen=True)
class Measured:
    """What a file has; what it does not have is None."""

    file: str
    link: Link | None = None
    """The slowest way between two nodes: bytes a second in its slower direction, and half of its time there and
    back."""
    pair: tuple[str, str] | None = None
    """Whose way that is, in the direction in which it is slow."""
    matmul: float | None = None
    """Operations a second in a large product, on the slowest device of the slowest node; in bf16 on GPUs, in fp32 on
    CPUs. Only where the health test found nothing failing."""
    matmul_node: str | None = None
    matmul_device: str | None = None
    """cuda or cpu."""
    all_gather: float | None = None
    """Bytes a second that a node gets from another, of the slowest two."""
    disk: float | None = None
    """Bytes a second, written and synced where runs will be."""


def read_measured(path: str | Path) -> Measured:
    """The figures of a file that `z2all doctor --json` has written, of several nodes or of one machine."""
    content = _read_json(path)
    try:
        if isinstance(content, list) and all({"name", "status"} <= entry.keys() for entry in content):
            return _of_one_machine(str(path), content)
        if isinstance(content, dict) and {"findings", "places", "pairs"} <= content.keys():
            return _of_nodes(str(path), content)
        raise ConfigError(f"file {path}", "is JSON of something else than `z2all doctor`", MEASURE)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"file {path}", f"is not as `z2all doctor` writes it ({error!r})", MEASURE) from None


def _read_json(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"file {path}", f"cannot be read ({error.strerror})", MEASURE) from None
    except ValueError as error:
        raise ConfigError(f"file {path}", f"is not JSON ({error})", MEASURE) from None


def _of_one_machine(file: str, findings: Sequence[Mapping[str, Any]]) -> Measured:
    of_disk = [each.get("measured") for each in findings if each["name"] == "disk speed"]
    figures = [figure["bytes_per_second"] for figure in of_disk if figure]  # none where nothing could be written
    if not figures:
        raise ConfigError(f"file {file}", "has no measured figure: neither pairs of nodes nor a disk's speed", MEASURE)
    return Measured(file, disk=_positive(file, "the disk's speed", figures[0]))


def _of_nodes(file: str, content: Mapping[str, Any]) -> Measured:
    ways: list[tuple[float, tuple[str, str], float]] = []
    for entry in content["pairs"]:
        pair = (str(entry["from"]), str(entry["to"]))
        latency = _positive(file, f"the latency of {' -> '.join(pair)}", entry["latency_us"]) / 2e6  # there and back
        for direction, gigabits in ((pair, entry["gigabits_out"]), (pair[::-1], entry["gigabits_in"])):
            speed = _positive(file, f"the speed of {' -> '.join(direction)}", gigabits) * 1e9 / 8
            ways.append((speed, direction, latency))
    if not ways:
        rule = f"has no pair of nodes that was measured ({len(content['places'])} data interfaces found)"
        raise ConfigError(f"file {file}", rule, "Give `z2all doctor` a hostfile of two nodes or more that connect.")
    speed, pair, latency = min(ways)
    link = Link("measured", speed, latency)
    return Measured(file, link, pair, **_of_health(file, content.get("health") or {}))


def _of_health(file: str, health: Mapping[str, Any]) -> dict[str, Any]:
    turns, device = health.get("turns", []), health.get("device")
    gathers = [turn["gather_gbps"] for turn in turns if turn["gather_gbps"] is not None]
    found: dict[str, Any] = {}
    if gathers:
        found["all_gather"] = _positive(file, "the speed of an all-gather", min(gathers)) * 1e9
    best: dict[str, float] = {}  # of each node: what else ran there disturbs one round
    for turn in turns:
        if turn["matmul_ms"] is not None:
            took = _positive(file, f"the time of a matmul on {turn['node']}", turn["matmul_ms"]) / 1e3
            best[turn["node"]] = min(took, best.get(turn["node"], math.inf))
    if best and device in MATMUL_OPERATIONS:
        slowest = max(best, key=lambda node: best[node])
        rate = MATMUL_OPERATIONS[device] / best[slowest]
        found |= {"matmul": rate, "matmul_node": slowest, "matmul_device": device}
    return found


def _positive(file: str, what: str, value: Any) -> float:
    """A speed of nothing, or of no number, would make a plan of nonsense."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{what} in {file}", f"is {value!r}, and must be a number above 0", "Measure again.")
    return float(value)
