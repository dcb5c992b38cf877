"""The addresses of an overlay, and the hostfile for training in it. Pure functions.

    box1  .1  hub   bridge z2all0 ◀─ tap ◀─ ssh tunnel ── z2all0  .2  box2
                                  ◀─ tap ◀─ ssh tunnel ── z2all0  .3  box3

The device has the same name on every node, so that one GLOO_SOCKET_IFNAME is valid on all nodes, also with DeepSpeed's
multi-node launchers.
"""

import ipaddress
from dataclasses import dataclass

import yaml

from z2all_ds.base.errors import ClusterError
from z2all_ds.cluster.nodes import Node

DEVICE = "z2all0"
KINDS = ("ssh", "vxlan")
NETWORK = "10.213.0.0/24"
FIRST_TAP = 2130
"""First number of the hub's tap devices, high enough to avoid those created by hand."""
KEY_MARK = "z2all-overlay"


@dataclass(frozen=True)
class Member:
    """A node with its address in the overlay."""

    node: Node
    number: int
    address: str

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def tap(self) -> int:
        """Number of the tap device at both ends of its tunnel."""
        return FIRST_TAP + self.number


@dataclass(frozen=True)
class OverlayPlan:
    """The members; the first one is the hub, to which the others connect."""

    kind: str
    network: ipaddress.IPv4Network
    members: list[Member]

    @property
    def hub(self) -> Member:
        return self.members[0]

    @property
    def workers(self) -> list[Member]:
        return self.members[1:]

    def peers(self, member: Member) -> list[Member]:
        """Return the members to which it has a direct link."""
        if self.kind == "ssh":
            return [] if member is self.hub else [self.hub]
        return [other for other in self.members if other is not member]

    @property
    def hub_sshd(self) -> tuple[str, int]:
        """Address and port at which other nodes reach the hub's sshd."""
        hub = self.hub.node
        port = (hub.outside.ssh_port if hub.outside else None) or hub.ssh.port or 22
        return (hub.outside.address if hub.outside else hub.ssh_address), port

    def key_line(self, worker: Member, public_key: str) -> str:
        """Return a line for the hub's authorized_keys that permits only this tunnel."""
        kind, key = public_key.split()[:2]
        options = f'restrict,tunnel="{worker.tap}",command="/bin/false"'
        return f"{options} {kind} {key} {key_mark(self.hub.node)}{worker.name}"

    def hostfile_text(self) -> str:
        """Return a hostfile of the same nodes with overlay addresses for the ranks; ssh settings stay the same."""
        nodes = {}
        for member in self.members:
            own = member.node.model_dump(exclude_none=True, exclude_defaults=True, exclude={"name", "outside"})
            nodes[member.name] = {**own, "inside": {"address": member.address}, "interface": DEVICE}
        head = f"# Written by `z2all cluster overlay up --kind {self.kind}`; valid while that overlay is up.\n"
        return head + yaml.safe_dump({"nodes": nodes}, sort_keys=False, allow_unicode=True)


def key_mark(hub: Node) -> str:
    """Return the prefix of our keys' comments. Node names contain no slash."""
    return f"{KEY_MARK}-{hub.name}/"


def make_overlay_plan(nodes: list[Node], kind: str, network: str) -> OverlayPlan:
    if kind not in KINDS:
        raise ClusterError(f"--kind {kind}", f"must be one of {', '.join(KINDS)}", "Choose one.")
    try:
        parsed = ipaddress.IPv4Network(network)
    except ValueError as error:
        fix = f"Give one like {NETWORK}."
        raise ClusterError(f"--network {network}", f"is not an IPv4 network ({error})", fix) from None
    if len(nodes) < 2:
        raise ClusterError(f"{len(nodes)} node", "an overlay needs two or more", "Add nodes to the hostfile.")
    if parsed.num_addresses < len(nodes) + 2:
        fix = "Give a larger one (a smaller number after the slash)."
        raise ClusterError(f"--network {network}", f"is too small for {len(nodes)} nodes", fix)
    members = [Member(node, number, str(parsed[number + 1])) for number, node in enumerate(nodes)]
    return OverlayPlan(kind, parsed, members)
