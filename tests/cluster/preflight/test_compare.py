"""Tests of the comparison of the facts of all nodes."""

from typing import Any

from z2all_ds.cluster.agents.connections import Speed
from z2all_ds.cluster.doctor import FAIL, OK, WARN
from z2all_ds.cluster.nodes import DataAddress
from z2all_ds.cluster.preflight.checks import Preflight
from z2all_ds.cluster.preflight.compare import NodeFinding, judge_clock, judge_nodes

SMALL = {"name": "shared memory", "status": "warn", "value": "64 MiB", "fix": "More."}


def facts(**changes: Any) -> dict[str, Any]:
    usual = {
        "host": "h",
        "python": "3.11.7",
        "packages": {"torch": "2.13.0", "deepspeed": "0.19.8"},
        "code": "aaaa",
        "files": {"/run.yaml": "1234"},
        "findings": [{"name": "disk", "status": "ok", "value": "1 TB", "fix": ""}],
        "gpus": [],
    }
    return {**usual, **changes}


def judged(**nodes: dict[str, Any]) -> dict[str, NodeFinding]:
    found = judge_nodes(nodes, dict.fromkeys(nodes, 2))
    assert len({finding.name for finding in found}) == len(found)
    return {finding.name: finding for finding in found}


def test_equal_nodes_are_ok() -> None:
    assert {finding.status for finding in judged(a=facts(), b=facts()).values()} == {OK}


def test_nodes_that_differ_from_the_majority_are_named() -> None:
    other = facts(packages={"torch": "2.12.0", "deepspeed": "0.19.8"}, code="bbbb", python="3.12.1")
    found = judged(a=facts(), b=facts(), c=other)
    for name in ("torch", "code of z2all_ds", "python"):
        assert (found[name].status, found[name].nodes) == (FAIL, ("c",))
    assert found["torch"].value == "c has 2.12.0; the others 2.13.0"
    assert found["deepspeed"].status == OK


def test_the_master_counts_as_right_if_two_nodes_differ() -> None:
    assert judged(a=facts(), b=facts(code="bbbb"))["code of z2all_ds"].nodes == ("b",)


def test_files_that_differ_or_are_missing_are_failures() -> None:
    assert judged(a=facts(), b=facts(files={"/run.yaml": "9999"}))["/run.yaml"].nodes == ("b",)
    missing = judged(a=facts(), b=facts(files={"/run.yaml": "No such file or directory"}))["/run.yaml"]
    assert (missing.status, missing.nodes) == (FAIL, ("b",))
    assert "b: No such file or directory" in missing.value


def test_the_same_problem_on_all_nodes_is_one_finding() -> None:
    found = judged(a=facts(findings=[SMALL]), b=facts(findings=[SMALL]))
    assert (found["all nodes: shared memory"].status, found["all nodes: shared memory"].nodes) == (WARN, ("a", "b"))
    assert judged(a=facts(findings=[SMALL]), b=facts())["a: shared memory"].nodes == ("a",)


def test_too_few_gpus_are_a_failure_and_different_gpus_a_warning() -> None:
    found = judged(a=facts(gpus=["H200, 580"] * 2), b=facts(gpus=["H200, 580"]))
    assert (found["b: GPUs"].status, found["b: GPUs"].value) == (FAIL, "1 for 2 slots")
    assert found["GPUs"].status == WARN


def test_a_clock_offset_is_a_warning_if_the_measurement_is_precise_enough() -> None:
    assert judge_clock("a", 1.5, 0.1).status == OK
    assert judge_clock("a", -5.0, 0.1).status == WARN
    assert judge_clock("a", 5.0, 4.0).status == OK  # the measurement is too uncertain


def result(*failures: NodeFinding) -> Preflight:
    addresses = {name: DataAddress("10.0.0.1", "eth0") for name in "abcd"}
    return Preflight(findings=list(failures), addresses=addresses, speeds={("a", "b"): Speed(1.0, 1.0, 1.0)})


def pair(one: str, other: str) -> NodeFinding:
    return NodeFinding(f"{one} -> {other}", FAIL, "no", "fix", pair=(one, other))


def test_as_few_nodes_as_possible_are_excluded() -> None:
    assert result().unfit() == []
    assert result(NodeFinding("b: disk", FAIL, "", "", ("b",))).unfit() == ["b"]
    assert result(NodeFinding("torch", FAIL, "", "", ("b", "d"))).unfit() == ["b", "d"]
    assert result(pair("a", "c"), pair("c", "a"), pair("b", "c"), pair("c", "d")).unfit() == ["c"]
    # The later node of a failing pair is excluded, because the first one is the master.
    assert result(pair("a", "b"), pair("b", "a")).unfit() == ["b"]
    # Pairs with a node that is already excluded exclude no other node.
    assert result(NodeFinding("c", FAIL, "", "", ("c",)), pair("a", "c"), pair("c", "b")).unfit() == ["c"]
