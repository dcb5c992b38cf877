"""What is to be done after a launch has ended: nothing, another try, or giving up, and why."""

import re
from dataclasses import dataclass, replace

from z2all_ds.base.errors import ClusterError
from z2all_ds.base.fault_records import BUG, HANG, KILLED, LOST_PEER, NODE_LOST, Fault, first_fault
from z2all_ds.cluster.launch.remote import NodeEnd
from z2all_ds.cluster.nodes import Node

RETRIED = (KILLED, HANG, LOST_PEER, NODE_LOST, BUG, "machine", "cluster")
"""What another try may cure. Not: config, data, checkpoint, training, export, out_of_memory, which come again."""
SUCCESSES = ("done", "stopped")


@dataclass(frozen=True)
class Verdict:
    """`fault` is None where the run ended as it should."""

    outcome: str
    """The run's own last word: done, stopped, requeue; or `failed`."""
    fault: Fault | None = None

    @property
    def may_be_cured(self) -> bool:
        return self.fault is not None and self.fault.kind in RETRIED


def judge(outcome: str | None, ends: list[NodeEnd], faults: list[Fault], nodes: list[Node]) -> Verdict:
    """The run's own word counts, not exit codes of launchers; a fault is named by who failed first."""
    if outcome in SUCCESSES or outcome == "requeue":
        return Verdict(outcome)
    first_ranks, total = {}, 0
    for node in nodes:
        first_ranks[node.name] = total
        total += node.slots
    for end in ends:
        if end.is_lost:
            said = f"ClusterError: node {end.name}: lost ({end.said or 'its connection closed'})"
            line = f"{said}. See that it is up and reached."
            faults = [*faults, Fault(NODE_LOST, first_ranks[end.name], end.name, line, ClusterError.exit_code)]
    fault = first_fault(faults)
    if fault is None:
        worst = next((end for end in ends if end.code), ends[0])
        line = f"ClusterError: node {worst.name}: its launcher ended with code {worst.code}: {worst.said or 'no word'}"
        fault = Fault("cluster", first_ranks[worst.name], worst.name, line, ClusterError.exit_code)
    return Verdict("failed", _about(fault, first_ranks))


def _about(fault: Fault, first_ranks: dict[str, int]) -> Fault:
    """All ranks say that one of them could not save; that one may not have been able to write even this down."""
    named = re.search(r"\(rank (\d+):", fault.line)
    if not named:
        return fault
    rank = int(named[1])
    host = [name for name, first in first_ranks.items() if first <= rank][-1]
    return replace(fault, rank=rank, host=host)
