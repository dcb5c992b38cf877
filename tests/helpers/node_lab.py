"""Simulated nodes on one machine, each with its own network, processes, host name, mounts, shared memory and sshd.

All files except those in ~/.ssh, /run, /dev/shm and /etc/hosts are shared, as on a NAS.

    bridge (in its own namespace) ── n0  10.77.0.10
                                  ├─ n1  10.77.0.11
                                  └─ n2  10.77.0.12

Needs root and Debian's openssh-server, pdsh, iproute2 and tini; `why_no_lab` returns what is missing.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.helpers.ssh_server import LOGIN_HOME, login_ssh_folder, make_key, sshd_config, tool_path

NETWORK = "10.77.0"
SSH_PORT = 2222
START_PATIENCE_SECONDS = 20.0
TOOLS = {"sshd": "openssh-server", "ssh": "openssh-client", "pdsh": "pdsh", "ip": "iproute2", "tini": "tini"}
SET_UP = """\
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
mount -t tmpfs -o size=256m tmpfs /dev/shm
mount --bind {folder}/ssh {home}/.ssh
mount --bind {folder}/hosts /etc/hosts
{mounts}
hostname {name}
ip link set lo up
exec tini -g -- {sshd} -D -e -f {folder}/sshd_config 2>>{folder}/sshd.log
"""


@cache
def why_no_lab() -> str:
    """Return the reason why no lab can be built, or an empty string."""
    missing = [package for tool, package in TOOLS.items() if not tool_path(tool)]
    if missing:
        return f"needs Debian's {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    tried = subprocess.run(
        [
            "unshare",
            "--net",
            "--uts",
            "--pid",
            "--mount",
            "--ipc",
            "--fork",
            "ip",
            "link",
            "add",
            "br0",
            "type",
            "bridge",
        ],
        capture_output=True,
        text=True,
    )
    return f"namespaces or bridges are not allowed here ({tried.stderr.strip()})" if tried.returncode else ""


def ip(*words: str, namespace: str = "") -> None:
    within = ["-n", namespace] if namespace else []
    subprocess.run([tool_path("ip") or "ip", *within, *words], check=True, capture_output=True, text=True)


@dataclass
class Node:
    """A node, which can be started and killed repeatedly."""

    name: str
    address: str
    folder: Path
    bridge: str
    """The namespace of the bridge to which it is connected."""
    namespace: str
    prefix: int = 24
    gateway: str = ""
    """The address of its default route, if it has one."""
    own_folders: tuple[Path, ...] = ()
    """Additional folders that it does not share with the other nodes."""
    process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    def start(self) -> None:
        """Start the node with its network, and wait until its sshd listens."""
        outer, inner = self.cable, "eth0"
        ip("netns", "add", self.namespace)
        ip("link", "add", outer, "netns", self.bridge, "type", "veth", "peer", "name", inner, "netns", self.namespace)
        ip("link", "set", outer, "master", "br0", "up", namespace=self.bridge)
        # The same MAC address after a restart: the other nodes cache it for a while.
        ip(
            "link",
            "set",
            inner,
            "address",
            f"02:77:00:00:00:{int(self.address.split('.')[-1]):02x}",
            namespace=self.namespace,
        )
        ip("addr", "add", f"{self.address}/{self.prefix}", "dev", inner, namespace=self.namespace)
        ip("link", "set", inner, "up", namespace=self.namespace)
        if self.gateway:
            ip("route", "add", "default", "via", self.gateway, namespace=self.namespace)
        mounts = "\n".join(f"mount --bind {self.outside(own)} {own}" for own in self.own_folders)
        words = {"name": self.name, "home": LOGIN_HOME, "sshd": tool_path("sshd"), "mounts": mounts}
        script = SET_UP.format(folder=self.folder, **words)
        isolated = ["unshare", "--uts", "--pid", "--mount", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        command = [tool_path("ip") or "ip", "netns", "exec", self.namespace, *isolated, "bash", "-c", script]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=(self.folder / "err").open("wb"))
        deadline = time.monotonic() + START_PATIENCE_SECONDS
        while not self._answers():
            assert self.process.poll() is None, (self.folder / "err").read_text()
            assert time.monotonic() < deadline, (self.folder / "sshd.log").read_text()
            time.sleep(0.05)

    def outside(self, own: Path) -> Path:
        """Create one of its own folders outside the node if it is missing, and return that path."""
        place = self.folder / "own" / own.name
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        return place

    def listening(self) -> set[tuple[str, int]]:
        """Return the addresses and ports on which its processes listen; all IPv6 addresses are returned as `::`."""
        found = set()
        for line in Path(f"/proc/{self.init}/net/tcp").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, port = local.split(":")
            if state == "0A":
                found.add((socket.inet_ntoa(int(address, 16).to_bytes(4, sys.byteorder)), int(port, 16)))
        for line in Path(f"/proc/{self.init}/net/tcp6").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                found.add(("::", int(local.split(":")[1], 16)))
        return found

    def _answers(self) -> bool:
        try:
            # The script starts sshd last, so the mounts and the host name are ready as well.
            return ("0.0.0.0", SSH_PORT) in self.listening()
        except (OSError, IndexError):  # not started yet
            return False

    @property
    def init(self) -> int:
        """Return the pid of the node's process 1, as seen from outside the node."""
        assert self.process is not None
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def kill(self) -> None:
        """Kill all processes at once and remove the network, as if the machine lost power."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None
            ip("link", "del", self.cable, namespace=self.bridge)  # deleting only the namespace removes it later
            ip("netns", "del", self.namespace)

    @property
    def cable(self) -> str:
        """Return the name of its interface at the bridge, which may have at most 15 characters."""
        return f"v{self.namespace}"

    def cut(self) -> None:
        """Disconnect the node from the bridge: packets are lost without an error."""
        ip("link", "set", self.cable, "nomaster", namespace=self.bridge)

    def heal(self) -> None:
        ip("link", "set", self.cable, "master", "br0", namespace=self.bridge)

    def command(self, *words: str) -> list[str]:
        """Return the command that runs `words` in the node."""
        spaces = ("--net", "--uts", "--pid", "--mount", "--ipc")
        return ["nsenter", "--target", str(self.init), *spaces, f"--wdns={os.getcwd()}", "--", *words]

    def run(self, *words: str, environment: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        env = {**os.environ, **(environment or {})}
        return subprocess.run(self.command(*words), capture_output=True, text=True, env=env)

    def processes(self, containing: str) -> dict[int, str]:
        """Return the running commands that contain a text, by their pids as seen from outside the node."""
        found = {}
        space = os.readlink(f"/proc/{self.init}/ns/pid")
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == space:
                    text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if containing in text and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                        found[int(entry.name)] = text
            except OSError:  # it has just ended
                continue
        return found


@contextmanager
def node_lab(folder: Path, number: int) -> Iterator[list[Node]]:
    """Yield `number` started nodes, `n0` and so on, which reach each other by name and accept one common ssh key."""
    mark = f"z{os.getpid() % 100000}"
    bridge = f"{mark}b"
    nodes = [Node(f"n{i}", f"{NETWORK}.{10 + i}", folder / f"n{i}", bridge, f"{mark}n{i}") for i in range(number)]
    with place_for_keys(folder) as key:
        try:
            add_bridge(bridge)
            for node in nodes:
                prepare(node, nodes, key)
                node.start()
            yield nodes
        finally:
            for node in nodes:
                node.kill()
            forget(bridge)


@contextmanager
def place_for_keys(folder: Path) -> Iterator[Path]:
    """Yield the ssh key of all nodes of a lab; ~/.ssh exists meanwhile, as a mount point for theirs."""
    folder.mkdir(parents=True, exist_ok=True)
    with login_ssh_folder():
        yield make_key(folder / "key")


def add_bridge(namespace: str) -> None:
    """Create a bridge in a new namespace."""
    ip("netns", "add", namespace)
    ip("link", "add", "br0", "type", "bridge", namespace=namespace)
    ip("link", "set", "br0", "up", namespace=namespace)


def forget(namespace: str) -> None:
    subprocess.run([tool_path("ip") or "ip", "netns", "del", namespace], capture_output=True)


def prepare(node: Node, nodes: list[Node], key: Path) -> None:
    ssh = node.folder / "ssh"
    ssh.mkdir(parents=True, mode=0o700)
    host_key = node.folder / "host_key"
    make_key(host_key)
    shutil.copy(key, ssh / "id_ed25519")
    shutil.copy(f"{key}.pub", ssh / "authorized_keys")
    config = sshd_config(SSH_PORT, host_key, ssh / "authorized_keys", "PermitTunnel yes", "MaxStartups 100")
    (node.folder / "sshd_config").write_text(config)
    lines = ["127.0.0.1 localhost", *(f"{other.address} {other.name}" for other in nodes)]
    (node.folder / "hosts").write_text("\n".join(lines) + "\n")
