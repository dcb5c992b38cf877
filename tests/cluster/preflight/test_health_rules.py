"""Tests of the health test: its pairs, its findings, and real nodes that are slow or cut off."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import node_lab
from tests.helpers.command import ROOT, environment
from z2all_ds.base.errors import ClusterError
from z2all_ds.cluster.doctor import FAIL, WARN
from z2all_ds.cluster.preflight.health_rules import Turn, judge_health, pairs_of_round

MATMUL_MS, GATHER_GBPS = 10.0, 8.0


def played(
    number: int,
    broken: frozenset[int] = frozenset(),
    slow_network: frozenset[int] = frozenset(),
    slow_matmul: frozenset[int] = frozenset(),
    noise: dict[int, float] | None = None,
) -> list[Turn]:
    """Return the turns of all rounds between nodes with these faults; a pair is as good as its worse node."""
    names = [f"n{i:02d}" for i in range(number)]
    turns: list[Turn] = []
    for number_of_round in (1, 2, 3):
        for pair in pairs_of_round(number_of_round, names, list(turns)):
            numbers = [int(name[1:]) for name in pair]
            fails = any(each in broken for each in numbers)
            gbps = GATHER_GBPS * min(
                (0.1 if each in slow_network else 1) * (noise or {}).get(each, 1) for each in numbers
            )
            for one, other in (pair, pair[::-1]):
                ms = MATMUL_MS * (3 if int(one[1:]) in slow_matmul else 1)
                measured: dict[str, Any] = {} if fails else {"matmul_ms": ms, "gather_gbps": gbps}
                turns.append(Turn(number_of_round, one, other, **measured, problem="lost" if fails else ""))
    assert pairs_of_round(4, names, turns) == []
    return turns


def named(turns: list[Turn], status: str = FAIL, exclude_slow: bool = False) -> list[str]:
    return sorted(name for found in judge_health(turns, exclude_slow) if found.status == status for name in found.nodes)


# Pairs


@given(st.integers(3, 40), st.data())
def test_every_node_has_two_different_partners(number: int, data: st.DataObject) -> None:
    noise = data.draw(st.dictionaries(st.integers(0, number - 1), st.floats(0.01, 3)))
    broken = data.draw(st.frozensets(st.integers(0, number - 1)))
    turns = played(number, broken, noise=noise)
    assert {turn.round for turn in turns} == ({1, 2, 3} if number % 2 else {1, 2})
    assert set(Counter((turn.round, turn.node) for turn in turns).values()) == {1}
    assert set(Counter((turn.node, turn.partner) for turn in turns).values()) == {1}
    assert set(Counter(turn.node for turn in turns).values()) == {2}


def test_two_nodes_are_paired_once() -> None:
    assert len(played(2)) == 2


def test_the_slower_half_is_paired_with_the_faster_half() -> None:
    turns = played(8, slow_network=frozenset({1, 4}))
    later = {(turn.node, turn.partner) for turn in turns if turn.round == 2}
    slow = {"n00", "n01", "n04", "n05"}
    assert all((one in slow) != (other in slow) for one, other in later)


# Findings


@given(st.integers(3, 40), st.data())
def test_one_bad_node_is_named_and_no_other(number: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, number - 1))
    name, only = f"n{bad:02d}", frozenset({bad})
    assert [found.nodes for found in judge_health(played(number, broken=only))] == [(name,)]
    for turns in (played(number, slow_network=only), played(number, slow_matmul=only)):
        assert named(turns, WARN) == [name] and named(turns) == []
        assert named(turns, FAIL, exclude_slow=True) == [name]


@given(st.integers(2, 40), st.data())
def test_noise_is_not_a_fault(number: int, data: st.DataObject) -> None:
    noise = data.draw(st.dictionaries(st.integers(0, number - 1), st.floats(0.75, 1.4)))
    assert judge_health(played(number, noise=noise)) == []


@given(st.integers(3, 24), st.data())
def test_a_node_that_works_with_another_is_never_named(number: int, data: st.DataObject) -> None:
    broken = data.draw(st.frozensets(st.integers(0, number - 1)))
    turns = played(number, broken)
    assert not {turn.node for turn in turns if not turn.problem} & set(named(turns))
    failed = {frozenset((turn.node, turn.partner)) for turn in turns if turn.problem}
    blamed = {name for found in judge_health(turns) for name in (*found.nodes, *found.pair)}
    assert all(pair & blamed for pair in failed)  # every failure is reported


def test_with_two_nodes_the_pair_is_named() -> None:
    (found,) = judge_health(played(2, broken=frozenset({1})))
    assert found.status == FAIL and found.nodes == () and found.pair == ("n00", "n01")
    assert named(played(2, slow_matmul=frozenset({1})), WARN) == ["n01"]


def test_a_broken_connection_between_two_healthy_nodes_names_the_pair() -> None:
    turns = [
        turn if {turn.node, turn.partner} != {"n00", "n01"} else Turn(1, turn.node, turn.partner, problem="timed out")
        for turn in played(4)
    ]
    (found,) = judge_health(turns)
    assert found.pair == ("n00", "n01") and "timed out" in found.value


def test_a_problem_of_either_node_counts_for_the_pair() -> None:
    turns = [
        Turn(turn.round, turn.node, turn.partner, 10.0, 8.0, "arrived changed" if turn.partner == "n02" else "")
        for turn in played(4)
    ]
    (found,) = judge_health(turns)
    assert found.nodes == ("n02",) and "arrived changed" in found.value


def test_a_nodes_own_failure_is_not_attributed_to_its_partner() -> None:
    turns = [turn for turn in played(4) if turn.round == 1]
    turns += [Turn(2, "n00", "n02", problem="ended by SIGKILL", alone=True), Turn(2, "n02", "n00", 10.0, None, "lost")]
    turns += [Turn(2, "n01", "n03", 10.0, 8.0), Turn(2, "n03", "n01", 10.0, 8.0)]
    (found,) = judge_health(turns)
    assert found.nodes == ("n00",) and "SIGKILL" in found.value


# Real nodes


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[node_lab.Node]]:
    if node_lab.why_no_lab():
        pytest.skip(node_lab.why_no_lab())
    with node_lab.node_lab(tmp_path_factory.mktemp("lab"), 3) as nodes:
        yield nodes


def looked_at(nodes: list[node_lab.Node], folder: Path, *options: str, **of_nodes: Any) -> tuple[int, dict[str, Any]]:
    """Run `z2all doctor --hostfile` on the first node, and return its exit code and result."""
    hosts = {"all": {"slots": 1, "ssh": {"port": node_lab.SSH_PORT}}}
    hosts["nodes"] = {node.name: of_nodes.get(node.name, {}) for node in nodes}
    (folder / "hosts.yaml").write_text(json.dumps(hosts))  # JSON is valid YAML
    words = ("-m", "z2all_ds", "doctor", str(folder), "--hostfile", str(folder / "hosts.yaml"), "--json", *options)
    done = nodes[0].run(sys.executable, *words, environment=environment())
    assert done.stdout, done.stderr
    for node in nodes:
        assert node.processes("z2all_ds.") == {}
    return done.returncode, json.loads(done.stdout)


def blamed(found: dict[str, Any], status: str, about: str) -> list[str]:
    those = [finding for finding in found["findings"] if finding["status"] == status and about in finding["name"]]
    return [name for finding in those for name in finding["nodes"]]


def test_healthy_nodes_pass_and_every_pair_is_measured(nodes: list[node_lab.Node], tmp_path: Path) -> None:
    code, found = looked_at(nodes, tmp_path)
    assert code == 0, found["findings"]
    health = found["health"]
    assert sorted((turn["round"], turn["node"], turn["partner"]) for turn in health["turns"]) == [
        (1, "n0", "n1"),
        (1, "n1", "n0"),
        (2, "n0", "n2"),
        (2, "n2", "n0"),
        (3, "n1", "n2"),
        (3, "n2", "n1"),
    ]
    assert all(turn["matmul_ms"] > 0 and turn["gather_gbps"] > 0 for turn in health["turns"])
    assert health["reduce_ms"] > 0


@pytest.mark.extended
def test_the_option_no_health_skips_the_health_test(nodes: list[node_lab.Node], tmp_path: Path) -> None:
    code, found = looked_at(nodes, tmp_path, "--no-health")
    assert code == 0 and found["health"] is None


@pytest.mark.extended
def test_a_slow_network_is_named(nodes: list[node_lab.Node], tmp_path: Path) -> None:
    # 30 Mbit/s, compared with several Gbit/s of the others: far more than the noise of a busy machine.
    limit = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "30mbit", "burst", "32k", "latency", "400ms")
    done = nodes[1].run(*limit)
    if done.returncode:
        pytest.skip(f"tc cannot limit a network here: {done.stderr.strip()}")
    try:
        code, found = looked_at(nodes, tmp_path, "--exclude-slow")
    finally:
        nodes[1].run("tc", "qdisc", "del", "dev", "eth0", "root")
    assert blamed(found, FAIL, "slow network") == ["n1"], found["health"]
    assert code == ClusterError.exit_code


@pytest.mark.extended
def test_a_node_without_torch_is_named_and_the_others_continue(nodes: list[node_lab.Node], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so: cannot open shared object file')")
    path = f"{tmp_path}:{ROOT}"
    code, found = looked_at(nodes, tmp_path, n2={"environment": {"PYTHONPATH": path}})
    assert code == ClusterError.exit_code
    (finding,) = [finding for finding in found["findings"] if finding["status"] == FAIL]
    assert finding["nodes"] == ["n2"] and "libcudart.so" in finding["value"]
    assert {turn["node"] for turn in found["health"]["turns"]} == {"n0", "n1"}
    assert found["health"]["reduce_ms"] > 0


TEST_ALONE = """
import json, os, sys
from dataclasses import asdict
from pathlib import Path
from z2all_ds.cluster.agents.fleet import agents_on
from z2all_ds.cluster.preflight.health_run import HealthTest, load_torch
from z2all_ds.cluster.nodes import DataAddress, Node, SshAccess
from z2all_ds.cluster.ssh import write_config
addresses = json.loads(sys.argv[1])
nodes = [Node(name=name, slots=1, ssh=SshAccess(port=2222)) for name in addresses]
data = {name: DataAddress(address, "eth0") for name, address in addresses.items()}
with agents_on(nodes, write_config(nodes, Path(sys.argv[2])), os.getcwd()) as agents:
    found = HealthTest(nodes, data, agents, 29555).run(load_torch(nodes, agents))
print(json.dumps(asdict(found)))
"""


@pytest.mark.extended
def test_a_node_that_fails_with_every_partner_is_named(nodes: list[node_lab.Node], tmp_path: Path) -> None:
    # Run only the health test: the connection checks of the preflight would find this first.
    rule = ("INPUT", "-i", "eth0", "-p", "tcp", "!", "--dport", str(node_lab.SSH_PORT), "-j", "DROP")
    done = nodes[0].run("iptables", "-I", *rule)
    if done.returncode:
        pytest.skip(f"iptables does not work here: {done.stderr.strip()}")
    try:
        addresses = json.dumps({node.name: node.address for node in nodes})
        words = (sys.executable, "-c", TEST_ALONE, addresses, str(tmp_path / "ssh_config"))
        # Run the test from another node than the one that is cut off.
        done = nodes[1].run(*words, environment=environment())
    finally:
        nodes[0].run("iptables", "-D", *rule)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (finding,) = [finding for finding in found["findings"] if finding["status"] == FAIL]
    assert finding["nodes"] == ["n0"], found
    assert found["reduce_ms"] > 0  # measured without n0, with another master


def begun(nodes: list[node_lab.Node], tmp_path: Path, of: node_lab.Node) -> "tuple[subprocess.Popen[str], int]":
    """Start only the health test, wait until a node's worker has opened its store, and return the test and that pid."""
    addresses = json.dumps({node.name: node.address for node in nodes})
    words = nodes[0].command(sys.executable, "-c", TEST_ALONE, addresses, str(tmp_path / "ssh_config"))
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment())
    while not listening(of):  # until its store is open
        assert process.poll() is None
        time.sleep(0.02)
    (pid,) = of.processes("z2all_ds.cluster.preflight.health_worker")
    return process, pid


@pytest.mark.extended
def test_a_slow_processor_is_named(nodes: list[node_lab.Node], tmp_path: Path) -> None:
    process, pid = begun(nodes, tmp_path, nodes[1])
    while process.poll() is None:  # the worker runs a fifth of the time
        for number, seconds in ((signal.SIGSTOP, 0.08), (signal.SIGCONT, 0.02)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            time.sleep(seconds)
    answer, _ = process.communicate()
    found = json.loads(answer)
    assert "n1: slow" in [finding["name"] for finding in found["findings"] if finding["status"] == WARN], found
    assert not [finding for finding in found["findings"] if finding["status"] == FAIL]


@pytest.mark.extended
def test_a_node_whose_worker_dies_is_named(nodes: list[node_lab.Node], tmp_path: Path) -> None:
    process, pid = begun(nodes, tmp_path, nodes[2])
    os.kill(pid, signal.SIGKILL)
    answer, _ = process.communicate(timeout=600)
    found = json.loads(answer)
    assert [finding["nodes"] for finding in found["findings"] if finding["status"] == FAIL] == [["n2"]], found
    assert found["reduce_ms"] > 0


def listening(node: node_lab.Node) -> bool:
    """Return whether a process of the node listens on a port other than sshd's."""
    lines = [line.split() for line in Path(f"/proc/{node.init}/net/tcp").read_text().splitlines()[1:]]
    return any(words[3] == "0A" and not words[1].endswith(f":{node_lab.SSH_PORT:04X}") for words in lines)


def test_help_names_the_options() -> None:
    for verb, options in (("doctor", ("--no-health", "--exclude-slow")), ("launch", ("--no-health", "--exclude-slow"))):
        words = [sys.executable, "-m", "z2all_ds", verb, "--help"]
        done = subprocess.run(words, capture_output=True, text=True, env=environment())
        assert all(option in done.stdout for option in options)
