"""Classifies the end of a launch: success, recoverable fault, or permanent fault, with its cause."""

import re
from dataclasses import dataclass, replace

from z2all_ds.base.errors import ClusterError
from z2all_ds.base.fault_records import BUG, HANG, KILLED, LOST_PEER, NODE_LOST, Fault, first_fault
from z2all_ds.cluster.launch.remote import NodeEnd
from z2all_ds.cluster.nodes import Node

RECOVERABLE = (KILLED, HANG, LOST_PEER, NODE_LOST, BUG, "machine", "cluster")
"""Faults that a restart may fix. Not: config, data, checkpoint, training, export, out_of_memory, which recur."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a launch; `fault` is None after a success."""

    outcome: str
    """As the run itself recorded it: done, stopped, requeue; or `failed`."""
    fault: Fault | None = None

    @property
    def is_recoverable(self) -> bool:
        return self.fault is not None and self.fault.kind in RECOVERABLE


def judge(outcome: str | None, ends: list[NodeEnd], faults: list[Fault], nodes: list[Node]) -> Verdict:
    """Return the verdict. The outcome that the run recorded counts, not exit codes of launchers."""
    if outcome in ("done", "stopped", "requeue"):
        return Verdict(outcome)
    first_ranks, total = {}, 0
    for node in nodes:
        first_ranks[node.name] = total
        total += node.slots
    for end in ends:
        if end.code is None:
            reason = end.last_line or "its connection closed"
            line = f"ClusterError: node {end.name}: lost ({reason}). Check that it is up and reachable."
            faults = [*faults, Fault(NODE_LOST, first_ranks[end.name], end.name, line, ClusterError.exit_code)]
    fault = first_fault(faults)
    if fault is None:
        worst = next((end for end in ends if end.code), ends[0])
        message = f"its launcher ended with code {worst.code}: {worst.last_line or 'no message'}"
        line = f"ClusterError: node {worst.name}: {message}"
        fault = Fault("cluster", first_ranks[worst.name], worst.name, line, ClusterError.exit_code)
    return Verdict("failed", _with_named_rank(fault, first_ranks))


def _with_named_rank(fault: Fault, first_ranks: dict[str, int]) -> Fault:
    """Return the fault with the rank that its message names: all ranks report that one of them could not save."""
    named = re.search(r"\(rank (\d+):", fault.line)
    if not named:
        return fault
    rank = int(named[1])
    host = [name for name, first in first_ranks.items() if first <= rank][-1]
    return replace(fault, rank=rank, host=host)
