"""`z2all cluster overlay`: gives every node an address that all others reach, for nodes without direct connections.

    check all nodes ─▶ hub: bridge ─▶ others: a key each ─▶ hub: accepts the keys ─▶ others connect ─▶ tested
                    ─▶ all: a vxlan device that knows all peers ─────────────────────────────────────▶

With ssh the network is a star: frames travel through tunnels (`ssh -w`, layer 2) to the first node, the hub, whose
published ssh port is the only one that must be reachable. With vxlan every pair communicates directly, over UDP.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from z2all_ds.base.console import printable, say
from z2all_ds.base.errors import ClusterError
from z2all_ds.base.outputs import MARK, check_output, write_output
from z2all_ds.base.reports import Shown, print_report
from z2all_ds.cluster import ssh
from z2all_ds.cluster.agents.fleet import RemoteAgent, agents_on, wait_for_all
from z2all_ds.cluster.nodes import YAML_SUFFIXES, Node, SshAccess, read_nodes
from z2all_ds.cluster.overlay.node import VXLAN_PORT
from z2all_ds.cluster.overlay.plan import DEVICE, Member, OverlayPlan, key_mark, make_overlay_plan

MODULE = "z2all_ds.cluster.overlay.node"
ANSWER_SECONDS = 40.0
PARALLEL_TUNNELS = 8
"""An sshd drops connections at random while ten or more have not logged in (MaxStartups)."""
Arguments = Mapping[str, Mapping[str, Any]]
"""By node."""


class Agents:
    """The overlay agents of all nodes, by name."""

    def __init__(self, agents: Mapping[str, RemoteAgent]) -> None:
        self._agents = agents

    def ask_each(self, method: str, arguments: Arguments) -> tuple[dict[str, Any], list[ClusterError]]:
        """Call a method on several nodes at once, with arguments for each; return answers and errors."""
        asked = {name: self._agents[name].ask(method, **own) for name, own in arguments.items()}
        answers, failures = wait_for_all(asked, ANSWER_SECONDS)
        errors = []
        for name, failure in failures.items():
            fix = failure.fix or f"Fix it on {name}; `z2all cluster overlay down` removes what was created there."
            errors.append(ClusterError(f"{name}: {failure.title}", failure.message, fix))
        return answers, errors

    def call_each(self, method: str, arguments: Arguments) -> dict[str, Any]:
        """As `ask_each`, but raises the first error."""
        answers, errors = self.ask_each(method, arguments)
        if errors:
            raise errors[0]
        return answers

    def call(self, name: str, method: str, /, **arguments: Any) -> Any:
        return self.call_each(method, {name: arguments})[name]


@contextmanager
def _agents_on(nodes: list[Node]) -> Iterator[Agents]:
    with tempfile.TemporaryDirectory() as temporary:
        config = ssh.write_config(nodes, Path(temporary) / "ssh_config")
        with agents_on(nodes, config, os.getcwd(), MODULE) as agents:
            yield Agents(agents)


# Up


def up(hostfile: str, kind: str, network: str, out: Path | None) -> None:
    """Create or repair the overlay; then write or print the hostfile for training in it."""
    plan = make_overlay_plan(read_nodes(hostfile), kind, network)
    if out and out.suffix not in YAML_SUFFIXES:
        raise ClusterError(f"--out {out}", "must end in .yaml or .yml", "Give such a name.")
    if out:
        check_output(out)
    with _agents_on([member.node for member in plan.members]) as agents:
        states = _check(plan, agents)
        broken = [member for member in plan.members if not _works(plan, agents, member, states[member.name])]
        if not broken:
            say(f"overlay {plan.network} is up already")
        else:
            try:
                if kind == "ssh":
                    _connect_tunnels(plan, agents, broken, states[plan.hub.name]["user"])
                else:
                    _connect_vxlan(plan, agents, broken)
            except BaseException:
                # What worked before stays; nothing half-created does.
                _take_down(agents, plan.members if len(broken) >= len(plan.workers) else broken, plan.hub.node)
                raise
            say(f"overlay {plan.network} is up: " + ", ".join(f"{one.name} {one.address}" for one in plan.members))
    if out:
        # Private, since the environment of a node may contain keys.
        write_output(out, f"# {MARK}\n{plan.hostfile_text()}", mode=0o600)
        say(f"wrote {out}: z2all launch --hostfile {out} -- ...")
    else:
        print(printable(plan.hostfile_text()), end="")


def _check(plan: OverlayPlan, agents: Agents) -> dict[str, Any]:
    """Return the state of every node; raise if one cannot take part."""
    request = {"kind": plan.kind, "network": str(plan.network)}
    states = agents.call_each("check", {one.name: {"name": one.name, **request} for one in plan.members})
    for what, fix in next((state["missing"] for state in states.values() if state["missing"]), []):
        names = [name for name, state in states.items() if [what, fix] in state["missing"]]
        raise ClusterError(", ".join(names), what, fix)
    namespaces: dict[str, str] = {}
    for name, state in states.items():
        first = namespaces.setdefault(state["namespace"], name)
        if first != name:
            rule = "share one network stack, which can have only one address in an overlay"
            raise ClusterError(f"{first} and {name}", rule, "They reach each other already: leave out one of them.")
    for member in plan.members:
        saved = states[member.name]["saved"]
        found = (saved.get("kind"), saved.get("network"), saved.get("address"))
        if saved and found != (plan.kind, str(plan.network), member.address):
            rule = f"is already {found[2]} in an overlay of kind {found[0]} on {found[1]}"
            raise ClusterError(member.name, rule, "Remove that first: z2all cluster overlay down --hostfile ...")
    return states


def _works(plan: OverlayPlan, agents: Agents, member: Member, state: Mapping[str, Any]) -> bool:
    return bool(state["is_up"]) and all(_reaches(agents, member, peer) for peer in plan.peers(member))


def _reaches(agents: Agents, member: Member, other: Member) -> bool:
    return bool(agents.call(member.name, "reaches", address=other.address))


def _own(plan: OverlayPlan, member: Member) -> dict[str, Any]:
    address = {"network": str(plan.network), "address": member.address, "prefix": plan.network.prefixlen}
    return {"name": member.name, "kind": plan.kind, **address}


def _connect_tunnels(plan: OverlayPlan, agents: Agents, broken: list[Member], user: str) -> None:
    hub = plan.hub.name
    agents.call(hub, "create_bridge", **_own(plan, plan.hub))
    keys = agents.call_each("public_key", {one.name: {"name": one.name} for one in plan.workers})
    lines = [plan.key_line(worker, keys[worker.name]) for worker in plan.workers]
    agents.call(hub, "accept_keys", mark=key_mark(plan.hub.node), lines=lines)
    address, port = plan.hub_sshd
    target = {"hub": {"address": address, "port": port, "user": user}, "hub_address": plan.hub.address}
    # A new bridge has no tunnels: then all nodes have to connect.
    callers = plan.workers if plan.hub in broken else broken
    for start in range(0, len(callers), PARALLEL_TUNNELS):
        batch = callers[start : start + PARALLEL_TUNNELS]
        for member in batch:
            agents.call(hub, "remove_tap", tap=f"tap{member.tap}")
        arguments = {one.name: {**_own(plan, one), **target, "tap": one.tap} for one in batch}
        problems = agents.call_each("open_tunnel", arguments)
        for member in batch:
            if problems[member.name]:
                raise tunnel_error(plan, member, problems[member.name])
            if not agents.call(hub, "attach_tap", tap=f"tap{member.tap}"):
                raise tunnel_error(plan, member, agents.call(member.name, "ssh_output", name=member.name))
        for member in batch:
            if not _reaches(agents, member, plan.hub):
                rule = f"its tunnel is open, but {plan.hub.address} of {hub} does not answer"
                raise ClusterError(member.name, rule, "Check the firewall rules (iptables -S) of both.")


def tunnel_error(plan: OverlayPlan, worker: Member, stderr: str) -> ClusterError:
    """Return the error that the stderr of a worker's ssh describes."""
    address, port = plan.hub_sshd
    hub = plan.hub.name
    if "Permission denied" in stderr:
        fix = f"The sshd of {hub} must read ~/.ssh/authorized_keys and accept that user's key (PermitRootLogin)."
        return ClusterError(worker.name, f"{hub} does not accept its key", fix)
    if re.search(r"Tunnel forwarding failed|administratively prohibited|open failed", stderr):
        fix = f"Set `PermitTunnel yes` in /etc/ssh/sshd_config of {hub} and restart its sshd."
        return ClusterError(hub, f"its sshd opens no tunnel for {worker.name}", fix)
    failure = ssh.ssh_failure(Node(name=hub, slots=1, ssh=SshAccess(address=address, port=port)), stderr)
    if failure.kind in ("port", "unreachable", "name"):
        fix = f"Publish the ssh port of {hub} and give `outside: {{address: ..., ssh_port: ...}}` for it."
        return ClusterError(f"{worker.name} -> {address}:{port}", f"cannot reach {hub} ({failure.message})", fix)
    return ClusterError(f"{worker.name} -> {address}:{port}", failure.message, failure.fix)


def _connect_vxlan(plan: OverlayPlan, agents: Agents, broken: list[Member]) -> None:
    arguments = {}
    for member in broken:
        peers = {one.address: one.node.address_for_others for one in plan.peers(member)}
        arguments[member.name] = {**_own(plan, member), "hub_address": plan.hub.address, "peers": peers}
    agents.call_each("create_vxlan", arguments)
    for member in plan.members:
        for other in plan.peers(member):
            if not _reaches(agents, member, other):
                rule = f"no answer from {other.address} over UDP to {other.node.address_for_others}:{VXLAN_PORT}"
                fix = f"Publish that port on both (docker run -p {VXLAN_PORT}:{VXLAN_PORT}/udp), or use --kind ssh."
                raise ClusterError(f"{member.name} -> {other.name}", rule, fix)


# Down


def down(hostfile: str) -> None:
    """End tunnels, remove devices, keys and files; continue if a node does not answer, and raise at the end."""
    nodes = read_nodes(hostfile)
    with _agents_on(nodes) as agents:
        errors = _take_down(agents, [Member(node, number, "") for number, node in enumerate(nodes)], nodes[0])
    if errors:
        raise errors[0]
    say(f"no overlay on {', '.join(node.name for node in nodes)}")


def _take_down(agents: Agents, members: list[Member], hub: Node) -> list[ClusterError]:
    """Take down the hub last: its ends of the tunnels vanish when the other nodes disconnect."""
    workers = {one.name: {"name": one.name, "mark": None} for one in members if one.name != hub.name}
    _, errors = agents.ask_each("down", workers)
    if len(workers) < len(members):
        errors += agents.ask_each("down", {hub.name: {"name": hub.name, "mark": key_mark(hub)}})[1]
    return errors


# Status


@dataclass(frozen=True)
class MemberStatus:
    """The state of one node."""

    name: str
    address: str
    kind: str
    status: str
    """up, broken, or none."""
    detail: str


def status(hostfile: str, as_json: bool) -> int:
    """Print the state of every node; the exit code is 0 if all are up."""
    nodes = read_nodes(hostfile)
    with _agents_on(nodes) as agents:
        found = [_status_of(node.name, agents) for node in nodes]
    print_report(found, as_json, _describe)
    return 0 if all(one.status == "up" for one in found) else ClusterError.exit_code


def _describe(found: list[MemberStatus]) -> Shown:
    for one in found:
        device = f"{DEVICE} {one.address} ({one.kind})" if one.address else ""
        yield f"{one.name}: {one.status} {device} {one.detail}".rstrip()


def _status_of(name: str, agents: Agents) -> MemberStatus:
    try:
        state = agents.call(name, "state", name=name)
        saved = state["saved"]
        if not saved:
            return MemberStatus(name, "", "", "none", "")
        hub = saved.get("hub_address")
        answers = state["is_up"] and (not hub or agents.call(name, "reaches", address=hub))
    except ClusterError as error:
        return MemberStatus(name, "", "", "broken", str(error))
    if answers:
        detail = f"tunnel {saved['pid']} to {hub}" if "pid" in saved else ""
        return MemberStatus(name, saved["address"], saved["kind"], "up", detail)
    reason = f"{hub} does not answer" if state["is_up"] else "its tunnel or device is gone"
    detail = f"{reason}: `z2all cluster overlay up` restores it"
    return MemberStatus(name, saved["address"], saved["kind"], "broken", detail)
