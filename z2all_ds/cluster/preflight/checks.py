"""The preflight: checks every node and every pair of nodes before a launch, in parallel, within seconds.

    agents on all nodes ─▶ facts ─▶ compared (`compare.py`)
                        ─▶ run folder shared? ─▶ data addresses ─▶ every pair connects in both directions
                                                                ─▶ every node reaches the rendezvous of the ranks
                        ─▶ torch, loaded meanwhile ─▶ health test of the nodes without failures (`health_run.py`)

Ranks connect to the address of each other's data interface, whatever the hostfile calls the node. Therefore pairs are
tested on that address.
"""

import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from z2all_ds.cluster.agents.connections import Speed
from z2all_ds.cluster.agents.fleet import RemoteAgent, agents_on, wait_for_all
from z2all_ds.cluster.doctor import FAIL, OK
from z2all_ds.cluster.nodes import DataAddress, Node, inside_port, rendezvous
from z2all_ds.cluster.overlay.plan import DEVICE as OVERLAY_DEVICE
from z2all_ds.cluster.preflight.compare import NodeFinding, judge_clock, judge_nodes
from z2all_ds.cluster.preflight.health_run import Health, HealthTest, load_torch
from z2all_ds.cluster.ssh import NoAnswer

ANSWER_SECONDS = 15.0
MEASURE_SECONDS = 0.15
PAIR_FIX = (
    "Ranks connect every pair directly. Use host networking (docker run --network host), routed container networks,"
    " or an overlay (`z2all cluster overlay up`); see docs/cluster.md."
)
T = TypeVar("T")


@dataclass
class Preflight:
    """The result."""

    findings: list[NodeFinding] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    """Nodes that ssh could not connect to or that did not answer."""
    addresses: dict[str, DataAddress] = field(default_factory=dict)
    gpus: dict[str, int] = field(default_factory=dict)
    speeds: dict[tuple[str, str], Speed] = field(default_factory=dict)
    """Keys: (connecting node, listening node)."""
    health: Health | None = None
    """None if it was not requested, or fewer than two nodes had no failure."""
    seconds: float = 0.0

    def ok(self, name: str, value: str) -> None:
        self.findings.append(NodeFinding(name, OK, value))

    def fail(self, name: str, value: str, fix: str, nodes: Sequence[str] = (), pair: Sequence[str] = ()) -> None:
        self.findings.append(NodeFinding(name, FAIL, value, fix, tuple(nodes), tuple(pair)))

    @property
    def failures(self) -> list[NodeFinding]:
        return [finding for finding in self.findings if finding.status == FAIL]

    @property
    def device(self) -> str:
        """The torch device type that ranks will train on."""
        return "cuda" if any(self.gpus.values()) else "cpu"

    def unfit(self) -> list[str]:
        """Return the fewest nodes without which nothing fails: those with a failure of their own, then for failing
        pairs the node that is in most of them."""
        excluded = list(dict.fromkeys(name for finding in self.failures for name in finding.nodes))
        pairs = [finding.pair for finding in self.failures if finding.pair]
        while pairs := [pair for pair in pairs if not set(pair) & set(excluded)]:
            counted = Counter(name for pair in pairs for name in pair)
            most = max(counted.values())
            # The last one of a tie, so that the master stays if possible.
            excluded.append([name for name in self.addresses if counted[name] == most][-1])
        return excluded


@dataclass(frozen=True)
class Subject:
    """The parts of a launch that concern nodes."""

    nodes: list[Node]
    ssh_config: Path
    folder: str
    """Working directory of commands on every node."""
    run_dir: str
    files: list[str]
    """Files that must be the same on every node."""
    master_port: int


def preflight(subject: Subject, health: bool = False, exclude_slow: bool = False) -> Preflight:
    """Run all checks; those that depend on a failed one are skipped.

    `health` also runs the health test; with `exclude_slow` a slow node is a failure.
    """
    started = time.monotonic()
    with agents_on(subject.nodes, subject.ssh_config, subject.folder) as agents:
        loading = load_torch(subject.nodes, agents) if health else {}
        checks = _Checks(subject, agents)
        result = checks.run()
        unfit = result.unfit()
        fit = [node for node in checks.nodes if node.name not in unfit]
        if health and len(fit) > 1:
            test = HealthTest(fit, result.addresses, agents, subject.master_port)
            result.health = test.run(loading, exclude_slow)
            result.findings += result.health.findings
    result.seconds = time.monotonic() - started
    return result


class _Checks:
    """All checks except the health test. `nodes` are those that answer."""

    def __init__(self, subject: Subject, agents: Mapping[str, RemoteAgent]) -> None:
        self.subject, self.agents = subject, agents
        self.result = Preflight()
        self.nodes: list[Node] = []

    def run(self) -> Preflight:
        facts = self._read_facts()
        if self.nodes:
            self.result.findings += judge_nodes(facts, {node.name: node.slots for node in self.nodes})
            self._check_clocks()
            self._check_run_dir()
        if len(self.nodes) > 1:
            for node in self.nodes:
                self._find_data_address(node, facts[node.name]["interfaces"])
            self._check_pairs()
            self._check_rendezvous()
        return self.result

    def _read_facts(self) -> dict[str, Any]:
        request = {"run_dir": self.subject.run_dir, "files": self.subject.files}
        asked = {name: agent.ask("facts", **request) for name, agent in self.agents.items()}
        facts, failures = wait_for_all(asked, ANSWER_SECONDS)
        for name, failure in failures.items():
            self.result.lost.add(name)
            self.result.fail(f"{name}: {failure.title}", failure.message, failure.fix, [name])
        for name, fact in facts.items():
            self.result.ok(f"{name}: ssh and python", f"answers as {fact['host']}")
        self.nodes = [node for node in self.subject.nodes if node.name in facts]
        self.result.gpus = {name: len(fact["gpus"]) for name, fact in facts.items()}
        return facts

    def _check_clocks(self) -> None:
        for node in self.nodes:  # one by one: waiting for each other would count as skew
            before = time.time()
            try:
                there = self.agents[node.name].call("time_unix", ANSWER_SECONDS)
            except NoAnswer:
                continue
            after = time.time()
            self.result.findings.append(judge_clock(node.name, there - (before + after) / 2, (after - before) / 2))

    def _check_run_dir(self) -> None:
        """Check that all nodes see one run folder: every rank writes its part of a checkpoint there."""
        run_dir, marker = self.subject.run_dir, f".preflight_{secrets.token_hex(8)}"
        first, *others = [node.name for node in self.nodes]
        request = {"folder": run_dir, "name": marker}
        try:
            self.agents[first].call("create_marker", ANSWER_SECONDS, **request)
        except NoAnswer as failure:
            fix = "Choose another run_dir."
            self.result.fail(f"{first}: run_dir", f"{run_dir} cannot be written ({failure})", fix, [first])
            return
        try:
            asked = {name: self.agents[name].ask("sees_marker", **request) for name in others}
            seen, _ = wait_for_all(asked, ANSWER_SECONDS)
            is_here = (Path(run_dir) / marker).exists()
        finally:
            self.agents[first].call("remove_marker", ANSWER_SECONDS, **request)
        blind = [name for name in others if not seen.get(name)]
        if blind:
            value = f"{run_dir} of {first} is a different folder than on {', '.join(blind)}"
            fix = "Set run_dir to a folder on a disk that all nodes share (NFS, a NAS)."
            self.result.fail("run_dir", value, fix, blind)
        elif not is_here:
            value = f"{run_dir} of {first} is a different folder than on this machine, which reads the run's outcome"
            self.result.fail("run_dir", value, f"Launch from {first}, or mount that disk here.")
        else:
            self.result.ok("run_dir", f"{run_dir} is the same folder on all nodes")

    def _find_data_address(self, node: Node, interfaces: dict[str, list[str]]) -> None:
        """Take the address from the hostfile, else the one that packets between the master and this node carry."""
        towards = self.nodes[1 if node is self.nodes[0] else 0].address_for_others
        try:
            if node.inside:
                address = node.inside.address
            elif node.interface:
                address = next(iter(interfaces.get(node.interface, [])), "")
            else:
                address = self.agents[node.name].call("source_address", ANSWER_SECONDS, towards=towards)
        except NoAnswer as failure:
            fix = "Correct the name in the hostfile, or add it to /etc/hosts there."
            self.result.fail(f"{node.name}: route to {towards}", str(failure), fix, [node.name])
            return
        having = [name for name, addresses in interfaces.items() if address in addresses]
        interface = node.interface or next(iter(having), "")
        if not address or interface not in having:
            found = ", ".join(f"{name} {' '.join(addresses)}" for name, addresses in interfaces.items())
            wanted = f"{node.interface or 'an interface'} with {address or 'an address'}"
            fix = f"Correct `interface` or `inside` of {node.name} in the hostfile."
            if node.interface == OVERLAY_DEVICE:
                fix = "Its overlay is down: run `z2all cluster overlay up` again, with the same hostfile as before."
            self.result.fail(f"{node.name}: interface", f"no {wanted} among {found}", fix, [node.name])
            return
        self.result.addresses[node.name] = DataAddress(address, interface)
        self.result.ok(f"{node.name}: data interface", f"{interface} {address}")

    def _check_pairs(self) -> None:
        addresses = {name: data.address for name, data in self.result.addresses.items()}
        # One token per node: nodes in private networks may have the same address, and then reach themselves.
        tokens = {name: secrets.token_hex(16) for name in addresses}
        asked = {
            name: self.agents[name].ask("listen", address=address, port=0, token=tokens[name])
            for name, address in addresses.items()
        }
        ports, _ = wait_for_all(asked, ANSWER_SECONDS)

        def check(pair: tuple[str, str]) -> None:
            for who, whom in (pair, pair[::-1]):
                target = {"address": addresses[whom], "port": ports[whom], "token": tokens[whom]}
                try:
                    speed = self.agents[who].call("measure", ANSWER_SECONDS, **target, seconds=MEASURE_SECONDS)
                    self.result.speeds[who, whom] = Speed(**speed)
                except NoAnswer as failure:
                    # Nodes on one machine's network may share an address; their ports differ.
                    why = "that is its own address, too" if addresses[who] == addresses[whom] else str(failure)
                    value = f"{who} cannot connect to {addresses[whom]} of {whom} ({why})"
                    self.result.fail(f"{who} -> {whom}", value, PAIR_FIX, pair=(who, whom))

        with ThreadPoolExecutor(max(1, len(ports))) as threads:
            for pairs in rounds(list(ports)):
                list(threads.map(check, pairs))
        for name, port in ports.items():
            self.agents[name].ask("close", port=port)

    def _check_rendezvous(self) -> None:
        """Check the port where the ranks will meet: on the master by its inside address, from elsewhere outside."""
        master, port = self.nodes[0], self.subject.master_port
        if master.name not in self.result.addresses:
            return
        data, agent, inside = self.result.addresses[master.name], self.agents[master.name], inside_port(master, port)
        token = secrets.token_hex(16)
        try:
            agent.call("listen", ANSWER_SECONDS, address=data.address, port=inside, token=token)
        except NoAnswer as failure:
            fix = "Another job may use it: choose another port with --master-port, or end that job."
            self.result.fail(f"{master.name}: port {inside}", str(failure), fix, [master.name])
            return
        address, outside = rendezvous(master, data, port)
        target = {"address": address, "port": outside, "token": token}
        for node in self.nodes[1:]:
            try:
                self.agents[node.name].call("measure", ANSWER_SECONDS, **target, seconds=0.0)
                self.result.ok(f"{node.name} -> master", f"{address}:{outside}")
            except NoAnswer as failure:
                fix = f"Publish port {inside} of {master.name} and give `outside: {{address: ..., port: ...}}` for it."
                self.result.fail(f"{node.name} -> master", f"{address}:{outside}: {failure}", fix, [node.name])
        agent.ask("close", port=inside)


def rounds(items: Sequence[T]) -> list[list[tuple[T, T]]]:
    """Return all pairs as rounds of a tournament, in which every item has at most one partner per round.

    The first item stays, the others rotate around it; with an odd number one of them rests in each round.
    """
    circle: list[T | None] = [*items, *([None] if len(items) % 2 else [])]
    result = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        partners = zip(circle[:half], reversed(circle[half:]), strict=True)
        result.append([(one, other) for one, other in partners if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return result
