"""Tests of the verdicts on how a launch ended."""

import pytest

from z2all_ds.base.fault_records import HANG, KILLED, LOST_PEER, NODE_LOST, Fault
from z2all_ds.cluster.launch.remote import NodeEnd
from z2all_ds.cluster.launch.verdicts import Verdict, judge
from z2all_ds.cluster.nodes import Node

NODES = [Node(name="a", slots=2), Node(name="b", slots=2), Node(name="c", slots=1)]
WELL = [NodeEnd(node.name, 0, "") for node in NODES]
BADLY = [NodeEnd("b", 1, "some words"), NodeEnd("a", 1, ""), NodeEnd("c", 130, "")]


def fault(kind: str, rank: int, line: str = "") -> Fault:
    return Fault(kind, rank, "abc"[min(rank // 2, 2)], line, 5, 0, 100.0)


@pytest.mark.parametrize("outcome", ["done", "stopped", "requeue"])
def test_the_recorded_outcome_overrides_the_exit_codes(outcome: str) -> None:
    assert judge(outcome, BADLY, [], NODES) == Verdict(outcome)


@pytest.mark.parametrize("outcome", [None, "started"])
def test_a_launch_without_a_recorded_outcome_has_failed(outcome: str | None) -> None:
    verdict = judge(outcome, WELL, [], NODES)
    assert verdict.outcome == "failed"
    assert verdict.fault


def test_without_a_fault_record_the_first_node_that_failed_is_named() -> None:
    found = judge("started", BADLY, [], NODES).fault
    assert found
    assert (found.host, found.rank) == ("b", 2)
    assert "code 1: some words" in found.line


def test_a_lost_node_takes_precedence_over_the_faults_of_its_peers() -> None:
    ends = [NodeEnd("c", None, "Timeout, server c not responding."), *BADLY[:2]]
    found = judge("started", ends, [fault(HANG, 0), fault(LOST_PEER, 2)], NODES).fault
    assert found
    assert (found.kind, found.host, found.rank) == (NODE_LOST, "c", 4)
    assert "not responding" in found.line


def test_a_failed_save_is_attributed_to_the_rank_it_names() -> None:
    line = "NotSaved: checkpoint of step 5: could not be written (rank 3: [Errno 28] No space left on device). ..."
    found = judge("started", BADLY, [fault("machine", 0, line)], NODES).fault
    assert found
    assert (found.rank, found.host) == (3, "b")


@pytest.mark.parametrize(
    ("kind", "again"),
    [
        *((kind, True) for kind in (KILLED, HANG, LOST_PEER, NODE_LOST, "bug", "machine", "cluster")),
        *((kind, False) for kind in ("config", "data", "checkpoint", "training", "export", "out_of_memory")),
    ],
)
def test_only_certain_kinds_of_faults_are_recoverable(kind: str, again: bool) -> None:
    assert judge("started", BADLY, [fault(kind, 1)], NODES).is_recoverable is again
    assert not Verdict("done").is_recoverable
