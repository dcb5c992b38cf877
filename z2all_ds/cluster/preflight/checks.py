"""Before a launch: every node and every pair of nodes is tried out for real, all at the same time, in seconds.

    agents on all nodes ─▶ facts ─▶ judged side by side (`compare.py`)
                        ─▶ one folder for all? ─▶ data addresses ─▶ every pair connects both ways and is measured
                                                               ─▶ every node reaches the master's meeting point
                        ─▶ torch, loaded meanwhile ─▶ health test of those that are fit so far (`health_run.py`)

Ranks tell each other the address of their data interface, whatever the hostfile calls the node; so that address is what
pairs are tried on.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from z2all_ds.cluster.agents.connections import Speed
from z2all_ds.cluster.agents.fleet import NoAnswer, RemoteAgent, agents_on
from z2all_ds.cluster.agents.pairs import rounds
from z2all_ds.cluster.doctor import FAIL, OK
from z2all_ds.cluster.launch.rendezvous import DataAddress, inside_port, meeting_point
from z2all_ds.cluster.nodes import Node
from z2all_ds.cluster.overlay.plan import DEVICE as OVERLAY_DEVICE
from z2all_ds.cluster.preflight.compare import NodeFinding, judge_clock, judge_nodes
from z2all_ds.cluster.preflight.health_run import Health, HealthTest, load_torch

ANSWER_SECONDS = 15.0
MEASURE_SECONDS = 0.15
WAYS_OUT = (
    "Ranks connect every pair directly. Use host networking (docker run --network host), routed container networks,"
    " or an overlay (`z2all cluster overlay up`); see docs/cluster.md."
)


@dataclass
class Preflight:
    """All that was found."""

    findings: list[NodeFinding] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    """Nodes that could not be entered or did not answer."""
    places: dict[str, DataAddress] = field(default_factory=dict)
    gpus: dict[str, int] = field(default_factory=dict)
    speeds: dict[tuple[str, str], Speed] = field(default_factory=dict)
    """By who connected to whom."""
    health: Health | None = None
    """None where it was not asked for, or fewer than two nodes were fit for it."""
    seconds: float = 0.0

    @property
    def failures(self) -> list[NodeFinding]:
        return [finding for finding in self.findings if finding.status == FAIL]

    @property
    def device(self) -> str:
        """What ranks will train on, as torch calls it."""
        return "cuda" if any(self.gpus.values()) else "cpu"

    def unfit(self) -> list[str]:
        """The fewest nodes without which nothing fails: those with a failure of their own, then, of pairs that do not
        find each other, the one that is in most of them."""
        left_out = list(dict.fromkeys(name for finding in self.failures for name in finding.nodes))
        pairs = [finding.pair for finding in self.failures if finding.pair]
        while pairs := [pair for pair in pairs if not set(pair) & set(left_out)]:
            counted = Counter(name for pair in pairs for name in pair)
            most = max(counted.values())
            # Of equals the last, so that the master stays if it can.
            left_out.append([name for name in self.places if counted[name] == most][-1])
        return left_out


@dataclass(frozen=True)
class Subject:
    """What is to be launched, as far as nodes are concerned."""

    nodes: list[Node]
    ssh_config: Path
    folder: str
    """Where commands run on every node."""
    run_dir: str
    files: list[str]
    """That must be there, and the same, on every node."""
    master_port: int


def preflight(subject: Subject, health: bool = False, exclude_slow: bool = False) -> Preflight:
    """Looks at everything; what cannot be looked at because of an earlier failure is left out.

    `health` runs a real torch job, too; with `exclude_slow` a node that it finds slow is not fit.
    """
    started = time.monotonic()
    result = Preflight()
    with agents_on(subject.nodes, subject.ssh_config, subject.folder) as agents:
        loading = load_torch(subject.nodes, agents) if health else {}
        facts = _facts(subject, agents, result)
        present = {name: agents[name] for name in facts}
        result.gpus = {name: len(fact["gpus"]) for name, fact in facts.items()}
        if facts:
            slots = {node.name: node.slots for node in subject.nodes}
            result.findings += judge_nodes(facts, slots)
            result.findings += _clocks(present, result)
            result.findings += _shared_folder(subject, present)
        nodes = [node for node in subject.nodes if node.name in facts]
        if len(nodes) > 1:
            _find_places(nodes, present, facts, result)
            _try_pairs(present, result)
            _try_master(subject, nodes, present, result)
            unfit = result.unfit()
            fit = [node for node in nodes if node.name not in unfit]
            if health and len(fit) > 1:
                result.health = HealthTest(fit, result.places, present, subject.master_port).run(loading, exclude_slow)
                result.findings += result.health.findings
    result.seconds = time.monotonic() - started
    return result


def _answers(asked: Mapping[str, "Future[Any]"], lost: Callable[[str, NoAnswer], None]) -> dict[str, Any]:
    """What came in time; whoever did not answer is reported and left out."""
    deadline = time.monotonic() + ANSWER_SECONDS
    answers = {}
    for name, future in asked.items():
        try:
            answers[name] = future.result(max(0.0, deadline - time.monotonic()))
        except NoAnswer as problem:
            lost(name, problem)
        except NotInTime:
            lost(name, NoAnswer.late(ANSWER_SECONDS))
    return answers


def _facts(subject: Subject, agents: Mapping[str, RemoteAgent], result: Preflight) -> dict[str, Any]:
    def lost(name: str, problem: NoAnswer) -> None:
        result.lost.add(name)
        trouble = problem.trouble
        result.findings.append(NodeFinding(f"{name}: {trouble.title}", FAIL, trouble.said, trouble.fix, (name,)))

    asked = {name: agent.ask("facts", run_dir=subject.run_dir, files=subject.files) for name, agent in agents.items()}
    facts = _answers(asked, lost)
    for name in facts:
        result.findings.append(NodeFinding(f"{name}: ssh and python", OK, f"answers as {facts[name]['host']}"))
    return facts


def _clocks(agents: Mapping[str, RemoteAgent], result: Preflight) -> list[NodeFinding]:
    findings = []
    for name, agent in agents.items():  # one after the other: answers that wait for each other would count as skew
        before = time.time()
        try:
            there = agent.ask("hello").result(ANSWER_SECONDS)["time_unix"]
        except (NoAnswer, NotInTime):
            continue
        after = time.time()
        findings.append(judge_clock(name, there - (before + after) / 2, (after - before) / 2))
    return findings


def _shared_folder(subject: Subject, agents: Mapping[str, RemoteAgent]) -> list[NodeFinding]:
    """Each rank writes its part of a checkpoint into the run folder, and all read them."""
    mark = f".preflight_{secrets.token_hex(8)}"
    first, *others = agents
    try:
        agents[first].ask("leave_mark", folder=subject.run_dir, name=mark).result(ANSWER_SECONDS)
    except (NoAnswer, NotInTime) as error:
        return [
            NodeFinding(
                f"{first}: run_dir", FAIL, f"{subject.run_dir} cannot be written ({error})", "Give another.", (first,)
            )
        ]
    try:
        asked = {name: agents[name].ask("sees_mark", folder=subject.run_dir, name=mark) for name in others}
        seen = _answers(asked, lambda name, problem: None)
        is_here = (Path(subject.run_dir) / mark).exists()
    finally:
        agents[first].ask("remove_mark", folder=subject.run_dir, name=mark).result(ANSWER_SECONDS)
    blind = [name for name in others if not seen.get(name)]
    if blind:
        told = f"{subject.run_dir} of {first} is not that of {', '.join(blind)}"
        return [
            NodeFinding(
                "run_dir",
                FAIL,
                told,
                "Set run_dir to a folder on a disk that all nodes share (NFS, a NAS).",
                tuple(blind),
            )
        ]
    if not is_here:
        told = f"{subject.run_dir} of {first} is not that of this machine, where the run's own word is waited for"
        return [NodeFinding("run_dir", FAIL, told, f"Launch from {first}, or mount that disk here.")]
    return [NodeFinding("run_dir", OK, f"{subject.run_dir} is one folder for all")]


def _find_places(
    nodes: list[Node], agents: Mapping[str, RemoteAgent], facts: Mapping[str, Any], result: Preflight
) -> None:
    """By the hostfile's word, else by the way that packets take between the master and the others."""
    for number, node in enumerate(nodes):
        towards = nodes[1 if number == 0 else 0].address_for_others
        interfaces: dict[str, list[str]] = facts[node.name]["interfaces"]
        try:
            if node.interface and not node.inside:
                address = next(iter(interfaces.get(node.interface, [])), "")
            elif node.inside:
                address = node.inside.address
            else:
                address = agents[node.name].ask("source_address", towards=towards).result(ANSWER_SECONDS)
        except (NoAnswer, NotInTime) as error:
            fix = "Correct the name in the hostfile, or add it to /etc/hosts there."
            result.findings.append(NodeFinding(f"{node.name}: way to {towards}", FAIL, str(error), fix, (node.name,)))
            continue
        having = [name for name, addresses in interfaces.items() if address in addresses]
        interface = node.interface or next(iter(having), "")
        if not address or interface not in interfaces or address not in interfaces[interface]:
            found = ", ".join(f"{name} {' '.join(those)}" for name, those in interfaces.items())
            wanted = f"{node.interface or 'an interface'} with {address or 'an address'}"
            fix = f"Correct `interface` or `inside` of {node.name} in the hostfile."
            if node.interface == OVERLAY_DEVICE:
                fix = (
                    "Its overlay is down: restore it with `z2all cluster overlay up` and the hostfile it was made from."
                )
            result.findings.append(
                NodeFinding(f"{node.name}: interface", FAIL, f"no {wanted} among {found}", fix, (node.name,))
            )
            continue
        result.places[node.name] = DataAddress(address, interface)
        result.findings.append(NodeFinding(f"{node.name}: data interface", OK, f"{interface} {address}"))


def _try_pairs(agents: Mapping[str, RemoteAgent], result: Preflight) -> None:
    # One for each: nodes in private networks may have the same address, and then reach themselves.
    tokens = {name: secrets.token_hex(16) for name in result.places}
    asked = {
        name: agents[name].ask("listen", address=place.address, port=0, token=tokens[name])
        for name, place in result.places.items()
    }
    ports = _answers(asked, lambda name, problem: None)

    def try_pair(pair: tuple[str, str]) -> list[NodeFinding]:
        findings = []
        for who, whom in (pair, pair[::-1]):
            place = result.places[whom]
            words = {"address": place.address, "port": ports[whom], "token": tokens[whom], "seconds": MEASURE_SECONDS}
            try:
                speed = Speed(**agents[who].ask("measure", **words).result(ANSWER_SECONDS))
                result.speeds[who, whom] = speed
            except (NoAnswer, NotInTime) as error:
                # Fine on one machine's network, where ports tell them apart.
                why = "that is its own address, too" if place.address == result.places[who].address else str(error)
                told = f"{who} cannot connect to {place.address} of {whom} ({why})"
                findings.append(NodeFinding(f"{who} -> {whom}", FAIL, told, WAYS_OUT, pair=(who, whom)))
        return findings

    names = [name for name in result.places if name in ports]
    with ThreadPoolExecutor(max(1, len(names))) as threads:
        for pairs in rounds(names):
            for found in threads.map(try_pair, pairs):
                result.findings += found
    for name in names:
        agents[name].ask("close", port=ports[name])


def _try_master(subject: Subject, nodes: list[Node], agents: Mapping[str, RemoteAgent], result: Preflight) -> None:
    """The very port on which ranks will meet: on the master by its inside, from elsewhere by its outside."""
    master = nodes[0]
    if master.name not in result.places:
        return
    token = secrets.token_hex(16)
    inside = inside_port(master, subject.master_port)
    place = result.places[master.name]
    try:
        agents[master.name].ask("listen", address=place.address, port=inside, token=token).result(ANSWER_SECONDS)
    except (NoAnswer, NotInTime) as error:
        fix = "Another job may have it: choose another with --master-port, or end that job."
        result.findings.append(NodeFinding(f"{master.name}: port {inside}", FAIL, str(error), fix, (master.name,)))
        return
    address, port = meeting_point(master, place, subject.master_port)
    for node in nodes[1:]:
        told = f"{address}:{port}"
        try:
            agents[node.name].ask("measure", address=address, port=port, token=token, seconds=0.0).result(
                ANSWER_SECONDS
            )
            result.findings.append(NodeFinding(f"{node.name} -> master", OK, told))
        except (NoAnswer, NotInTime) as error:
            fix = f"Publish port {inside} of {master.name} and give `outside: {{address: ..., port: ...}}` for it."
            result.findings.append(NodeFinding(f"{node.name} -> master", FAIL, f"{told}: {error}", fix, (node.name,)))
    agents[master.name].ask("close", port=inside)
