"""The health test's rules: who meets whom, and what the times say about each node. Pure, and without torch.

Matmuls are each node's own. But two nodes that exchange messages are as fast as the slower one, and fail if one of them
does. So every node meets two others, and what happens to it both times is its own doing (DLRover's way of finding a
straggler):

    round 1   neighbours: (0,1) (2,3) ...                                    of an odd number the last one rests
    round 2   by round 1's times, the slower half with the faster half       of an odd number another one rests
    round 3   the two that have rested meet                                  only with an odd number

DLRover puts an odd one into a group of three. Three nodes would be one and the same group in both rounds then, which
says nothing about any of them; so it rests instead.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from z2all_ds.cluster.doctor import FAIL, WARN
from z2all_ds.cluster.preflight.compare import NodeFinding

SLOW_MATMUL_FACTOR = 1.5
"""Equal machines are within some percent of each other; GPUs that run hot or lack power lose a third and more."""
SLOW_GATHER_FACTOR = 2.0
"""More than for matmuls: pairs behind different switches differ in good clusters, too."""
Pair = tuple[str, str]


@dataclass(frozen=True)
class Turn:
    """One node's part in one round."""

    round: int
    node: str
    partner: str
    matmul_ms: float | None = None
    """Of one product in the mean, on the slowest of its devices; None where it failed."""
    gather_gbps: float | None = None
    """Gigabytes a second that came from the partner; None where it failed."""
    problem: str = ""
    """Why it failed, as this node tells it."""
    alone: bool = False
    """It failed without the partner's doing: in its matmuls, or its process has ended."""


def pairs_of_round(number: int, names: Sequence[str], turns: Sequence[Turn]) -> list[Pair]:
    """Who meets in round 1, 2 or 3, from what came before; empty where nothing is left to learn."""
    first = list(zip(names[::2], names[1::2], strict=False))
    if number == 1:
        return first
    if len(names) < 3:  # the same two once more would say nothing new
        return []
    if number == 2:
        return _swapped(first, names, [turn for turn in turns if turn.round == 1])
    played = [turn.node for turn in turns]
    rested = [name for name in names if played.count(name) < 2]
    return [(rested[0], rested[1])] if len(rested) == 2 else []


def _swapped(first: list[Pair], names: Sequence[str], turns: list[Turn]) -> list[Pair]:
    """The slower half against the faster half. Partners stand beside each other in the order, and those who meet stand
    half its length apart, two places at least; so nobody meets the same one again."""
    ordered = sorted(first, key=lambda pair: _slowness(pair, turns))
    line: list[str | None] = [name for pair in ordered for name in pair]
    if len(names) % 2:  # nothing is known of it; beside it stands an empty place
        line += [names[-1], None]
    half = len(line) // 2
    return [(fast, slow) for fast, slow in zip(line[:half], line[half:], strict=True) if fast and slow]


def _slowness(pair: Pair, turns: list[Turn]) -> float:
    own = [turn for turn in turns if turn.node in pair]
    if any(turn.gather_gbps is None for turn in own):
        return math.inf
    return max((1 / max(turn.gather_gbps or 0.0, 1e-9) for turn in own), default=math.inf)


def judge_health(turns: Sequence[Turn], exclude_slow: bool = False) -> list[NodeFinding]:
    """What is not well; a slow node only warns, unless it is to be left out."""
    return [*_failed(turns), *_slow(turns, FAIL if exclude_slow else WARN)]


def _failed(turns: Sequence[Turn]) -> list[NodeFinding]:
    met: dict[str, dict[str, bool]] = {}
    for turn in turns:
        met.setdefault(turn.node, {})[turn.partner] = not _failure(turns, turn)
    alone = {turn.node: turn.problem for turn in turns if turn.alone}
    # Failed with two others, one of whom does work with somebody: then it is not them.
    broken = [
        name
        for name, others in met.items()
        if len(others) > 1 and not any(others.values()) and any(any(met[other].values()) for other in others)
    ]
    broken = [name for name in met if name in alone or name in broken]
    findings = []
    for name in broken:
        failed = "; ".join(f"with {other}: {_why(turns, name, other)}" for other in met[name] if not met[name][other])
        told = f"fails by itself ({alone[name]})" if name in alone else f"fails with every other node ({failed})"
        fix = (
            f"Look at {name}: its GPUs (nvidia-smi, dmesg), its network, its memory. Or start without it (--min-nodes)."
        )
        findings.append(NodeFinding(f"{name}: health", FAIL, told, fix, (name,)))
    for one, other in dict.fromkeys((min(turn.node, turn.partner), max(turn.node, turn.partner)) for turn in turns):
        if not met[one][other] and one not in broken and other not in broken:
            told = f"fail together: {_why(turns, one, other)}"
            fix = f"Try the two without the others, and look at the way between {one} and {other}."
            findings.append(NodeFinding(f"{one} and {other}: health", FAIL, told, fix, pair=(one, other)))
    return findings


def _failure(turns: Sequence[Turn], turn: Turn) -> str:
    """Of the meeting as a whole: what either of the two says, the one whose turn it is first."""
    others = [other for other in turns if (other.node, other.partner) == (turn.partner, turn.node)]
    return next((each.problem for each in (turn, *others) if each.problem), "")


def _why(turns: Sequence[Turn], node: str, partner: str) -> str:
    return next(_failure(turns, turn) for turn in turns if (turn.node, turn.partner) == (node, partner))


def _slow(turns: Sequence[Turn], status: str) -> list[NodeFinding]:
    findings = []
    fix = (
        "Look for other jobs, heat and power limits there (nvidia-smi -q -d PERFORMANCE); --exclude-slow leaves it out."
    )
    matmuls = {name: min(values) for name, values in _by_node(turns, "matmul_ms").items()}
    usual_ms = statistics.median_low(matmuls.values()) if matmuls else 0.0  # of two the faster one
    for name, best in matmuls.items():
        if best > SLOW_MATMUL_FACTOR * usual_ms:
            told = f"a matmul takes {best:.2f} ms there at best, {usual_ms:.2f} on most nodes"
            findings.append(NodeFinding(f"{name}: slow", status, told, fix, (name,)))
    fix = (
        "Look at its cable, port and link speed (ethtool, ibstat), and for other traffic; --exclude-slow leaves it out."
    )
    gathers = _by_node(turns, "gather_gbps")
    # The best of each: a slow partner spoils one round only.
    usual = statistics.median(max(values) for values in gathers.values()) if gathers else 0.0
    for name, values in gathers.items():
        if len(values) > 1 and max(values) * SLOW_GATHER_FACTOR < usual:
            told = f"all-gather at {max(values):.3g} GB/s at best, {usual:.3g} with most nodes"
            findings.append(NodeFinding(f"{name}: slow network", status, told, fix, (name,)))
    return findings


def _by_node(turns: Sequence[Turn], what: str) -> Mapping[str, list[float]]:
    found: dict[str, list[float]] = {}
    for turn in turns:
        value = getattr(turn, what)
        if value is not None:
            found.setdefault(turn.node, []).append(value)
    return found
