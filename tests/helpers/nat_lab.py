"""Containers behind the NAT of their machines, as docker creates them by default, but without docker.

    WAN bridge ── machine 10.88.0.1 ── docker-like bridge 172.17.0.1/16 ── box1 172.17.0.2
              ├── machine 10.88.0.2 ── docker-like bridge 172.17.0.1/16 ── box2 172.17.0.2, too
              └── ...

Each machine publishes some ports of its container and replaces the source address of outgoing packets by its own. A
container can reach neither its own published ports (no hairpin NAT) nor the private address of another container.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.helpers import node_lab
from tests.helpers.node_lab import SSH_PORT, Node, ip
from tests.helpers.ssh_server import tool_path
from z2all_ds.base.machine import private_temp_dir

WAN = "10.88.0"
PRIVATE_ADDRESS, GATEWAY, PREFIX = "172.17.0.2", "172.17.0.1", 16
PUBLISHED_SSH, PUBLISHED_MASTER, MASTER_PORT = 30022, 30846, 9527
VXLAN_PORT = 4789
PUBLISHED = (("tcp", PUBLISHED_SSH, SSH_PORT), ("tcp", PUBLISHED_MASTER, MASTER_PORT), ("udp", VXLAN_PORT, VXLAN_PORT))


@cache
def why_no_nat_lab() -> str:
    """Return the reason why no lab can be built, or an empty string."""
    if node_lab.why_no_lab():
        return node_lab.why_no_lab()
    if not tool_path("iptables"):
        return "needs Debian's iptables"
    rule = ["iptables", "-t", "nat", "-A", "POSTROUTING", "-s", "172.17.0.0/16", "-j", "MASQUERADE"]
    tried = subprocess.run(["unshare", "--net", *rule], capture_output=True, text=True)
    return f"the kernel cannot do NAT ({tried.stderr.strip()})" if tried.returncode else ""


def machine_address(number: int) -> str:
    return f"{WAN}.{number + 1}"


@contextmanager
def nat_lab(folder: Path, number: int) -> Iterator[list[Node]]:
    """Yield `number` started containers, `box1` and so on, each on its own machine; all accept one common ssh key."""
    mark = f"y{os.getpid() % 100000}"
    wan = f"{mark}w"
    machines = [f"{mark}m{i}" for i in range(number)]
    nodes = []
    for i, machine in enumerate(machines):
        name, own = f"box{i + 1}", (private_temp_dir(),)
        nodes.append(Node(name, PRIVATE_ADDRESS, folder / name, machine, f"{mark}c{i}", PREFIX, GATEWAY, own))
    with node_lab.place_for_keys(folder) as key:
        try:
            node_lab.add_bridge(wan)
            for i, node in enumerate(nodes):
                _add_machine(machines[i], wan, machine_address(i))
                node_lab.prepare(node, [node], key)
                node.start()
            yield nodes
        finally:
            for node in nodes:
                node.kill()
            for namespace in (*machines, wan):
                node_lab.forget(namespace)


def _add_machine(namespace: str, wan: str, address: str) -> None:
    """Add a machine with a bridge for its container and the NAT rules that docker would create."""
    node_lab.add_bridge(namespace)
    ip("addr", "add", f"{GATEWAY}/{PREFIX}", "dev", "br0", namespace=namespace)
    ip("link", "set", "lo", "up", namespace=namespace)
    outer = f"v{namespace}"
    ip("link", "add", outer, "netns", wan, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    ip("link", "set", outer, "master", "br0", "up", namespace=wan)
    ip("addr", "add", f"{address}/24", "dev", "eth0", namespace=namespace)
    ip("link", "set", "eth0", "up", namespace=namespace)
    rules = ["POSTROUTING -s 172.17.0.0/16 ! -o br0 -j MASQUERADE"]
    local = "-m addrtype --dst-type LOCAL"
    for protocol, port, inside in PUBLISHED:
        goes_to = f"DNAT --to-destination {PRIVATE_ADDRESS}:{inside}"
        rules.append(f"PREROUTING ! -i br0 -p {protocol} {local} --dport {port} -j {goes_to}")
    lines = ["set -e", "echo 1 >/proc/sys/net/ipv4/ip_forward"]
    lines += [f"{tool_path('iptables')} -t nat -A {rule}" for rule in rules]
    within = [tool_path("ip") or "ip", "netns", "exec", namespace]
    subprocess.run([*within, "bash", "-c", "\n".join(lines)], check=True, capture_output=True, text=True)
