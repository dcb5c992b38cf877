"""Rules of the health test: the pairs of each round, and what the results say about each node. Pure functions.

Matmuls concern one node only. But a pair that exchanges messages is as slow as its slower node, and fails if either
node does. So every node is paired with two others, and a problem that it has in both pairs is its own (the method of
DLRover):

    round 1   neighbours: (0,1) (2,3) ...                                 with an odd number of nodes the last one rests
    round 2   the slower half of round 1 with the faster half             with an odd number another node rests
    round 3   the two nodes that have rested                              only with an odd number

DLRover makes a group of three if the number is odd. Three nodes would be the same group in both rounds, which says
nothing about any of them.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from z2all_ds.cluster.doctor import FAIL, WARN
from z2all_ds.cluster.preflight.compare import NodeFinding

SLOW_MATMUL_FACTOR = 1.5
"""Equal machines differ by a few percent; GPUs that run hot or lack power lose a third or more."""
SLOW_GATHER_FACTOR = 2.0
"""More than for matmuls: pairs behind different switches differ in healthy clusters, too."""
Pair = tuple[str, str]


@dataclass(frozen=True)
class Turn:
    """The results of one node in one round."""

    round: int
    node: str
    partner: str
    matmul_ms: float | None = None
    """Mean of one product on the slowest of its devices; None if it failed."""
    gather_gbps: float | None = None
    """GB/s received from the partner; None if it failed."""
    problem: str = ""
    """Why it failed, as this node reports it."""
    alone: bool = False
    """It failed independently of the partner: in its matmuls, or its process ended."""


def pairs_of_round(number: int, names: Sequence[str], turns: Sequence[Turn]) -> list[Pair]:
    """Return the pairs of round 1, 2 or 3, given the previous results; empty after the last round."""
    first = list(zip(names[::2], names[1::2], strict=False))
    if number == 1:
        return first
    if len(names) < 3:  # the same pair again would give no information
        return []
    if number == 2:
        return _mixed(first, names, [turn for turn in turns if turn.round == 1])
    paired = [turn.node for turn in turns]
    rested = [name for name in names if paired.count(name) < 2]
    return [(rested[0], rested[1])] if len(rested) == 2 else []


def _mixed(first: list[Pair], names: Sequence[str], turns: list[Turn]) -> list[Pair]:
    """Pairs the slower half with the faster half. Partners of round 1 are adjacent in the order and new partners are at
    least two positions apart, so no pair repeats."""
    ordered = sorted(first, key=lambda pair: _slowness(pair, turns))
    line: list[str | None] = [name for pair in ordered for name in pair]
    if len(names) % 2:  # it has no result yet; None is its partner
        line += [names[-1], None]
    half = len(line) // 2
    return [(fast, slow) for fast, slow in zip(line[:half], line[half:], strict=True) if fast and slow]


def _slowness(pair: Pair, turns: list[Turn]) -> float:
    own = [turn for turn in turns if turn.node in pair]
    if any(turn.gather_gbps is None for turn in own):
        return math.inf
    return max((1 / max(turn.gather_gbps or 0.0, 1e-9) for turn in own), default=math.inf)


def judge_health(turns: Sequence[Turn], exclude_slow: bool = False) -> list[NodeFinding]:
    """Return problems; a slow node is a warning, or a failure with `exclude_slow`."""
    return [*_failed(turns), *_slow(turns, FAIL if exclude_slow else WARN)]


def _failed(turns: Sequence[Turn]) -> list[NodeFinding]:
    own = {(turn.node, turn.partner): turn.problem for turn in turns}
    problems = {pair: problem or own[pair[::-1]] for pair, problem in own.items()}  # of either node, its own first
    working = {node for (node, _), problem in problems.items() if not problem}
    alone = {turn.node: turn.problem for turn in turns if turn.alone}
    findings, broken = [], set()
    for name in dict.fromkeys(turn.node for turn in turns):
        partners = [other for one, other in problems if one == name]
        # It failed with two others, one of which works with another node.
        fails_with_all = len(partners) > 1 and name not in working and any(other in working for other in partners)
        if name in alone or fails_with_all:
            failed = [f"with {other}: {why}" for (one, other), why in problems.items() if one == name and why]
            value = f"fails with every other node ({'; '.join(failed)})"
            value = f"fails by itself ({alone[name]})" if name in alone else value
            fix = f"Check GPUs (nvidia-smi, dmesg), network and memory of {name}, or start without it (--min-nodes)."
            findings.append(NodeFinding(f"{name}: health", FAIL, value, fix, (name,)))
            broken.add(name)
    for (one, other), problem in problems.items():
        if problem and one < other and not broken & {one, other}:
            fix = f"Test the two without the others, and check the network between {one} and {other}."
            value = f"fail together: {problem}"
            findings.append(NodeFinding(f"{one} and {other}: health", FAIL, value, fix, pair=(one, other)))
    return findings


def _slow(turns: Sequence[Turn], status: str) -> list[NodeFinding]:
    findings = []
    fix = "Check for other jobs, heat and power limits (nvidia-smi -q -d PERFORMANCE); --exclude-slow leaves it out."
    matmuls = {name: min(values) for name, values in _by_node(turns, "matmul_ms").items()}
    usual_ms = statistics.median_low(matmuls.values()) if matmuls else 0.0  # with two nodes the faster one
    for name, best in matmuls.items():
        if best > SLOW_MATMUL_FACTOR * usual_ms:
            value = f"a matmul takes at least {best:.2f} ms there, {usual_ms:.2f} on most nodes"
            findings.append(NodeFinding(f"{name}: slow", status, value, fix, (name,)))
    fix = "Check cable, port, link speed (ethtool, ibstat) and other traffic; --exclude-slow leaves it out."
    gathers = _by_node(turns, "gather_gbps")
    # The best of each node: a slow partner affects one round only.
    usual = statistics.median(max(values) for values in gathers.values()) if gathers else 0.0
    for name, values in gathers.items():
        if len(values) > 1 and max(values) * SLOW_GATHER_FACTOR < usual:
            value = f"all-gather at no more than {max(values):.3g} GB/s, {usual:.3g} with most nodes"
            findings.append(NodeFinding(f"{name}: slow network", status, value, fix, (name,)))
    return findings


def _by_node(turns: Sequence[Turn], what: str) -> Mapping[str, list[float]]:
    found: dict[str, list[float]] = {}
    for turn in turns:
        value = getattr(turn, what)
        if value is not None:
            found.setdefault(turn.node, []).append(value)
    return found
