"""A network of its own for nodes that cannot reach each other: every node gets an address that all others reach.

    look at all nodes ─▶ hub: bridge ─▶ others: a key each ─▶ hub: takes the keys ─▶ others dial in ─▶ tried out
                      ─▶ all: a vxlan device that knows all peers ────────────────────────────────────▶

By ssh it is a star: frames travel through tunnels (`ssh -w`, layer 2) to the first node, whose published ssh port is
all that has to be reached, and from there on. By vxlan every pair has its own way, over UDP.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import TimeoutError as NotInTime
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from z2all_ds.base.atomic import write_whole
from z2all_ds.base.console import say
from z2all_ds.base.errors import ClusterError
from z2all_ds.cluster import ssh
from z2all_ds.cluster.agents.fleet import NoAnswer, RemoteAgent, agents_on
from z2all_ds.cluster.nodes import YAML_SUFFIXES, Node, SshAccess, read_nodes
from z2all_ds.cluster.overlay.node import VXLAN_PORT
from z2all_ds.cluster.overlay.plan import DEVICE, Member, OverlayPlan, key_mark, make_overlay_plan

MODULE = "z2all_ds.cluster.overlay.node"
ANSWER_SECONDS = 40.0
DIALS_AT_ONCE = 8
"""An sshd drops connections at random while ten or more have not yet logged in (MaxStartups)."""
Agents = Mapping[str, RemoteAgent]


@contextmanager
def _agents(nodes: list[Node]) -> Iterator[Agents]:
    with tempfile.TemporaryDirectory() as place:
        config = ssh.write_config(nodes, Path(place) / "ssh_config")
        with agents_on(nodes, config, os.getcwd(), MODULE) as agents:
            yield agents


def _ask_all(agents: Agents, what: str, words: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One question to several nodes at once, with each one's words; the first that fails is told."""
    asked = {name: agents[name].ask(what, **said) for name, said in words.items()}
    return {name: _answer(name, future.result) for name, future in asked.items()}


def _answer(name: str, result: Callable[[float], Any]) -> Any:
    try:
        return result(ANSWER_SECONDS)
    except NoAnswer as problem:
        trouble = problem.trouble
        fix = trouble.fix or f"Put it right on {name}; `z2all cluster overlay down` removes what is there of it."
        raise ClusterError(f"{name}: {trouble.title}", trouble.said, fix) from None
    except NotInTime:
        late = NoAnswer.late(ANSWER_SECONDS).trouble
        raise ClusterError(f"{name}: {late.title}", late.said, late.fix) from None


# Up


def up(hostfile: str, kind: str, network: str, out: Path | None) -> None:
    """Makes it, or what is missing of it; then writes or prints the hostfile for training in it."""
    plan = make_overlay_plan(read_nodes(hostfile), kind, network)
    if out and out.suffix not in YAML_SUFFIXES:
        raise ClusterError(f"--out {out}", "must end in .yaml or .yml", "Give such a name.")
    with _agents([member.node for member in plan.members]) as agents:
        looks = _look(plan, agents)
        whole = {name for name, seen in looks.items() if seen["is_held"]}
        broken = [member for member in plan.members if member.name not in whole]
        held = [member for member in plan.members if member.name in whole]
        broken += [member for member in held if not all(_reaches(agents, member, peer) for peer in plan.peers(member))]
        if not broken:
            say(f"overlay {plan.network} is up already")
        else:
            try:
                (_dial_in if kind == "ssh" else _join_all)(plan, agents, broken, looks[plan.hub.name]["user"])
            except BaseException:
                # What was whole before stays; nothing half-made does.
                _take_down(agents, plan.members if len(broken) >= len(plan.workers) else broken, plan.hub.node)
                raise
            say(f"overlay {plan.network} is up: " + ", ".join(f"{one.name} {one.address}" for one in plan.members))
    if out:
        write_whole(out, plan.hostfile_text())
        out.chmod(0o600)  # the environment of a node may hold keys
        say(f"wrote {out}: z2all launch --hostfile {out} -- ...")
    else:
        print(plan.hostfile_text(), end="")


def _look(plan: OverlayPlan, agents: Agents) -> dict[str, Any]:
    words = {"kind": plan.kind, "network": str(plan.network)}
    looks = _ask_all(agents, "look", {one.name: {"name": one.name, **words} for one in plan.members})
    for what, fix in next((seen["lacks"] for seen in looks.values() if seen["lacks"]), []):
        names = [name for name, seen in looks.items() if [what, fix] in seen["lacks"]]
        raise ClusterError(", ".join(names), what, fix)
    spaces: dict[str, str] = {}
    for name, seen in looks.items():
        first = spaces.setdefault(seen["network_space"], name)
        if first != name:
            rule = "share one network stack, which can have one place in an overlay"
            raise ClusterError(f"{first} and {name}", rule, "They reach each other already: leave out one of them.")
    for member in plan.members:
        state = looks[member.name]["state"]
        there = (state.get("kind"), state.get("network"), state.get("address"))
        if state and there != (plan.kind, str(plan.network), member.address):
            rule = f"is already {there[2]} in an overlay by {there[0]} on {there[1]}"
            raise ClusterError(member.name, rule, "End it first: z2all cluster overlay down --hostfile ...")
    return looks


def _own(plan: OverlayPlan, member: Member) -> dict[str, Any]:
    where = {"network": str(plan.network), "address": member.address, "prefix": plan.network.prefixlen}
    return {"name": member.name, "kind": plan.kind, **where}


def _dial_in(plan: OverlayPlan, agents: Agents, broken: list[Member], user: str) -> None:
    hub = agents[plan.hub.name]
    _answer(plan.hub.name, hub.ask("hold_hub", **_own(plan, plan.hub)).result)
    keys = _ask_all(agents, "public_key", {one.name: {"name": one.name} for one in plan.workers})
    lines = [plan.key_line(worker, keys[worker.name]) for worker in plan.workers]
    _answer(plan.hub.name, hub.ask("allow", mark=key_mark(plan.hub.node), lines=lines).result)
    address, port = plan.hub_place
    words = {"hub": {"address": address, "port": port, "user": user}, "hub_address": plan.hub.address}
    # A new bridge has no tunnel in it: then all have to dial.
    callers = plan.workers if plan.hub in broken else broken
    for start in range(0, len(callers), DIALS_AT_ONCE):
        batch = callers[start : start + DIALS_AT_ONCE]
        for member in batch:
            _answer(plan.hub.name, hub.ask("drop", tap=f"tap{member.tap}").result)
        said = _ask_all(agents, "dial", {one.name: {**_own(plan, one), **words, "tap": one.tap} for one in batch})
        for member in batch:
            if said[member.name]:
                raise tunnel_error(plan, member, said[member.name])
            if not _answer(plan.hub.name, hub.ask("adopt", tap=f"tap{member.tap}").result):
                last = agents[member.name].ask("said", name=member.name)
                raise tunnel_error(plan, member, _answer(member.name, last.result))
        for member in batch:
            if not _reaches(agents, member, plan.hub):
                rule = f"its tunnel is there, but {plan.hub.address} of {plan.hub.name} does not answer"
                raise ClusterError(member.name, rule, "Look for firewall rules (iptables -S) on both.")


def tunnel_error(plan: OverlayPlan, worker: Member, said: str) -> ClusterError:
    """What the words of a worker's ssh mean."""
    address, port = plan.hub_place
    hub = plan.hub.name
    if "Permission denied" in said:
        fix = f"Its sshd must read ~/.ssh/authorized_keys and let that user in by key (PermitRootLogin): see to {hub}."
        return ClusterError(worker.name, f"{hub} does not take its key", fix)
    if re.search(r"Tunnel forwarding failed|administratively prohibited|open failed", said):
        fix = f"Set `PermitTunnel yes` in /etc/ssh/sshd_config of {hub} and restart its sshd."
        return ClusterError(hub, f"its sshd opens no tunnel for {worker.name}", fix)
    way = Node(name=hub, slots=1, ssh=SshAccess(address=address, port=port))
    trouble = ssh.trouble_of(way, said)
    if trouble.kind in ("port", "unreachable", "name"):
        fix = f"Publish the ssh port of {hub} and give `outside: {{address: ..., ssh_port: ...}}` for it."
        return ClusterError(f"{worker.name} -> {address}:{port}", f"{hub} is not reached ({trouble.said})", fix)
    return ClusterError(f"{worker.name} -> {address}:{port}", trouble.said, trouble.fix)


def _join_all(plan: OverlayPlan, agents: Agents, broken: list[Member], user: str) -> None:
    words = {}
    for member in broken:
        peers = {one.address: one.node.address_for_others for one in plan.members if one is not member}
        words[member.name] = {**_own(plan, member), "hub_address": plan.hub.address, "peers": peers}
    _ask_all(agents, "hold_vxlan", words)
    for member in plan.members:
        for other in plan.peers(member):
            if not _reaches(agents, member, other):
                rule = f"no answer from {other.address} by UDP to {other.node.address_for_others}:{VXLAN_PORT}"
                fix = f"Publish that port on both (docker run -p {VXLAN_PORT}:{VXLAN_PORT}/udp), or use --kind ssh."
                raise ClusterError(f"{member.name} -> {other.name}", rule, fix)


def _reaches(agents: Agents, member: Member, other: Member) -> bool:
    return bool(_answer(member.name, agents[member.name].ask("answers", address=other.address).result))


# Down


def down(hostfile: str) -> None:
    """Ends tunnels, deletes devices, keys and files; goes on where a node does not answer, and tells at the end."""
    nodes = read_nodes(hostfile)
    members = [Member(node, number, "") for number, node in enumerate(nodes)]
    with _agents(nodes) as agents:
        problems = _take_down(agents, members, nodes[0])
    if problems:
        raise problems[0]
    say(f"no overlay on {', '.join(node.name for node in nodes)}")


def _take_down(agents: Agents, members: list[Member], hub: Node) -> list[ClusterError]:
    """The hub last: ends of tunnels vanish from it when the others hang up."""
    problems = []
    for some in ([one for one in members if one.name != hub.name], [one for one in members if one.name == hub.name]):
        asked = {
            one.name: agents[one.name].ask("down", name=one.name, mark=key_mark(hub) if one.name == hub.name else None)
            for one in some
        }
        for name, future in asked.items():
            try:
                _answer(name, future.result)
            except ClusterError as error:
                problems.append(error)
    return problems


# Status


@dataclass(frozen=True)
class MemberStatus:
    """Of one node."""

    name: str
    address: str
    kind: str
    status: str
    """up, broken, or none."""
    detail: str


def status(hostfile: str, as_json: bool) -> int:
    """Prints it; the exit code is 0 where every node is up."""
    nodes = read_nodes(hostfile)
    with _agents(nodes) as agents:
        asked = {node.name: agents[node.name].ask("state", name=node.name) for node in nodes}
        found = []
        for name, future in asked.items():
            try:
                found.append(_status_of(name, _answer(name, future.result), agents[name]))
            except ClusterError as error:
                found.append(MemberStatus(name, "", "", "broken", str(error)))
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        for one in found:
            place = f"{DEVICE} {one.address} by {one.kind}" if one.address else ""
            print(f"{one.name}: {one.status} {place} {one.detail}".rstrip())
    return 0 if all(one.status == "up" for one in found) else ClusterError.exit_code


def _status_of(name: str, seen: dict[str, Any], agent: RemoteAgent) -> MemberStatus:
    state = seen["state"]
    if not state:
        return MemberStatus(name, "", "", "none", "")
    hub = state.get("hub_address")
    if not seen["is_held"]:
        word, detail = "broken", "its tunnel or device is gone: `z2all cluster overlay up` restores it"
    elif hub and not _answer(name, agent.ask("answers", address=hub).result):
        word, detail = "broken", f"{hub} does not answer: `z2all cluster overlay up` restores it"
    else:
        word, detail = "up", f"tunnel {state['pid']} to {hub}" if "pid" in state else ""
    return MemberStatus(name, state["address"], state["kind"], word, detail)
