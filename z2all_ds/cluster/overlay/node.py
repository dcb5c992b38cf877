"""A node's part in an overlay: `python -m z2all_ds.cluster.overlay.node`, started over ssh and asked as an agent is.

What it starts and makes outlives the connection. A file below this user's temporary folder remembers it: the tunnel's
process by number and start time, the kind and the address. Its key lies there, too. `down` ends and removes what that
file names, what carries our mark, and nothing else.
"""

import errno
import json
import os
import pwd
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from z2all_ds.base.atomic import write_whole
from z2all_ds.base.child_process import end_group_of, start
from z2all_ds.base.machine import private_temp_dir, process_is_alive, process_start_time
from z2all_ds.cluster.agents.agent import Answers, serve
from z2all_ds.cluster.overlay import devices
from z2all_ds.cluster.overlay.plan import DEVICE

CONNECT_SECONDS = 8
ALIVE_EVERY_SECONDS, ALIVE_TRIES = 5, 3
TUNNEL_SECONDS = 15.0
"""For ssh to connect and make its device."""
END_SECONDS = 5.0
VXLAN_PORT, VXLAN_ID = 4789, 213
CAP_NET_ADMIN = 12
TUN = Path("/dev/net/tun")
TOOLS = {"ssh": {"ip": "iproute2", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}}
TOOLS["vxlan"] = {"ip": "iproute2", "bridge": "iproute2"}


class OverlayAgent(Answers):
    """What can be asked. `name` is always the node's in the hostfile: several nodes may share a temporary folder."""

    def look(self, name: str, kind: str, network: str) -> dict[str, Any]:
        """What this node lacks for an overlay, as pairs of what and fix, and what it knows of one."""
        lacks = lacking(kind)
        state = Memory(name).read()
        if not lacks:
            other = devices.overlapping(network, but=DEVICE)
            if other:
                lacks.append((f"{network} overlaps with {other}", "Choose another network with --network."))
            elif devices.exists(DEVICE) and not devices.is_ours(DEVICE):
                lacks.append((f"a device {DEVICE} of somebody else is there", "Delete or rename it."))
        user = pwd.getpwuid(os.getuid()).pw_name
        seen = {"user": user, "lacks": lacks, "state": state, "is_held": self.is_held(name)}
        return {**seen, "network_space": network_space()}

    def state(self, name: str) -> dict[str, Any]:
        return {"state": Memory(name).read(), "is_held": self.is_held(name)}

    def is_held(self, name: str) -> bool:
        """Whether the device is there and, if it hangs on a tunnel, that is, too."""
        state = Memory(name).read()
        if not state or not devices.is_ours(DEVICE):
            return False
        return "pid" not in state or process_is_alive(state["pid"], state["start_time"])

    def answers(self, address: str) -> bool:
        return devices.answers(address)

    # The hub

    def hold_hub(self, name: str, kind: str, network: str, address: str, prefix: int) -> None:
        memory = Memory(name)
        if not memory.read():
            devices.delete_ours(DEVICE)  # of whatever kind it was: nobody remembers
        memory.write(kind=kind, network=network, address=address)
        if not devices.exists(DEVICE):
            devices.ip("link", "add", "name", DEVICE, "type", "bridge")
        devices.hold_address(DEVICE, address, prefix, devices.MTU[kind])

    def allow(self, mark: str, lines: list[str]) -> None:
        """Takes these keys, and no others with that mark."""
        change_keys(mark, lines)

    def adopt(self, tap: str) -> bool:
        """The hub's end of a tunnel becomes part of its bridge; False where there is none."""
        if not devices.wait_for(tap, TUNNEL_SECONDS / 2):
            return False
        devices.ip("link", "set", "dev", tap, "mtu", str(devices.MTU["ssh"]), "master", DEVICE, "up")
        return True

    def drop(self, tap: str) -> None:
        """An end whose other end is gone without a word; its sshd notices that the device is no more."""
        if devices.exists(tap) and devices.links()[tap].get("master") == DEVICE:
            devices.delete(tap)

    # The others

    def public_key(self, name: str) -> str:
        """Of this node's own key for the tunnel, made now if there is none."""
        memory = Memory(name)
        memory.make()
        key = memory.folder / "key"
        if not key.exists():
            devices.run_tool("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key))
        return key.with_name("key.pub").read_text(encoding="utf-8")

    def dial(self, name: str, hub: dict[str, Any], tap: int, **own: Any) -> str:
        """Starts the tunnel to the hub; returns what went wrong, or nothing."""
        memory = Memory(name)
        end_tunnel(memory.read())
        devices.delete_ours(DEVICE)
        log = memory.folder / "ssh.log"
        with log.open("wb") as file:
            command, environment = tunnel_command(memory.folder, hub, tap), {**os.environ, "LC_ALL": "C"}
            process = start(command, environment, is_owned=False, stdout=file, stderr=file, cwd="/")  # it outlives us
        memory.write(**own, pid=process.pid, start_time=process_start_time(process.pid))
        deadline = time.monotonic() + TUNNEL_SECONDS
        while not devices.exists(f"tap{tap}"):
            if process.poll() is not None or time.monotonic() > deadline:
                return self.said(name) or f"no tunnel within {TUNNEL_SECONDS:.0f} s"
            time.sleep(0.05)
        try:
            devices.ip("link", "set", "dev", f"tap{tap}", "name", DEVICE)
            devices.hold_address(DEVICE, own["address"], own["prefix"], devices.MTU[own["kind"]])
        except OSError:
            # Its own end comes before the hub's: where that one refuses, ssh ends, and the device goes with it.
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
                return self.said(name)
            raise
        return ""

    def said(self, name: str) -> str:
        """By its ssh, so far."""
        with suppress(OSError):
            return (Memory(name).folder / "ssh.log").read_text(errors="replace")
        return ""

    # Without a hub

    def hold_vxlan(self, name: str, peers: dict[str, str], **own: Any) -> None:
        """`peers`: where packets for each overlay address go. All is written down, so that nothing is broadcast."""
        Memory(name).write(**own)
        devices.delete_ours(DEVICE)
        words = ("type", "vxlan", "id", str(VXLAN_ID), "dstport", str(VXLAN_PORT), "nolearning", "noudpcsum")
        devices.ip("link", "add", "name", DEVICE, *words)
        devices.hold_address(DEVICE, own["address"], own["prefix"], devices.MTU[own["kind"]])
        devices.checksums_in_software(DEVICE)
        for address, outside in peers.items():
            number = str(socket.getaddrinfo(outside, VXLAN_PORT, socket.AF_INET, socket.SOCK_DGRAM)[0][4][0])
            hardware = devices.hardware_address(address)
            devices.run_tool("bridge", "fdb", "append", hardware, "dev", DEVICE, "dst", number)
            devices.ip("neigh", "replace", address, "lladdr", hardware, "dev", DEVICE, "nud", "permanent")

    # The end

    def down(self, name: str, mark: str | None) -> bool:
        """Whether there was something to end. `mark`: of keys, on the hub."""
        memory = Memory(name)
        state = memory.read()
        had = bool(state) or devices.is_ours(DEVICE)
        end_tunnel(state)
        devices.delete_ours(DEVICE)
        if mark:
            change_keys(mark, [])
        memory.forget()
        return had


class Memory:
    """What a node remembers of its overlay between two commands."""

    def __init__(self, name: str) -> None:
        self.folder = private_temp_dir() / "overlay" / name

    def read(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / "state.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def make(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, **content: Any) -> None:
        self.make()
        write_whole(self.folder / "state.json", json.dumps(content))

    def forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # there is none, or another node has its folder there, too
            self.folder.parent.rmdir()


def network_space() -> str:
    """The same for two nodes that share one network stack, as containers with host networking on one machine do."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")


def lacking(kind: str) -> list[tuple[str, str]]:
    """What keeps this node out of an overlay, with the fix."""
    found = []
    missing = sorted({package for tool, package in TOOLS[kind].items() if not devices.find_tool(tool)})
    if missing:
        found.append((f"no {', '.join(missing)}", f"Install it: `apt install {' '.join(missing)}`."))
    capabilities = next(
        line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:")
    )
    if not int(capabilities, 16) >> CAP_NET_ADMIN & 1:
        fix = "Be root there, and start the container with `docker run --cap-add NET_ADMIN --device /dev/net/tun`."
        found.append(("it may not make network devices (no CAP_NET_ADMIN)", fix))
    if kind == "ssh":
        try:
            os.close(os.open(TUN, os.O_RDWR))
        except OSError as error:
            why = "is not there" if error.errno == errno.ENOENT else f"cannot be opened ({error.strerror})"
            found.append((f"{TUN} {why}", f"Start the container with `docker run --device {TUN}`."))
    return found


def tunnel_command(folder: Path, hub: dict[str, Any], tap: int) -> list[str]:
    """ssh with nothing but a tunnel. It does not read the user's config: theirs is for other ways."""
    options = {
        "BatchMode": "yes",
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "StrictHostKeyChecking": "accept-new",
        "UserKnownHostsFile": f'"{folder / "known_hosts"}"',
        "ConnectTimeout": CONNECT_SECONDS,
        "ServerAliveInterval": ALIVE_EVERY_SECONDS,
        "ServerAliveCountMax": ALIVE_TRIES,
        "ExitOnForwardFailure": "yes",
        "Tunnel": "ethernet",
        "LogLevel": "ERROR",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    place = ("-p", str(hub["port"]), "-l", hub["user"], hub["address"])
    return ["ssh", "-F", "none", "-N", "-T", *words, "-i", str(folder / "key"), "-w", f"{tap}:{tap}", *place]


def end_tunnel(state: dict[str, Any]) -> None:
    """That very process, and no other that has its number by now; its device goes with it."""
    if "pid" in state and process_is_alive(state["pid"], state["start_time"]):
        end_group_of(state["pid"])


def change_keys(mark: str, lines: list[str]) -> None:
    """In ~/.ssh/authorized_keys: the lines with our mark become these, all others stay as they are."""
    file = (Path.home() / ".ssh" / "authorized_keys").resolve()
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    before = text.removesuffix("\n").split("\n") if text else []
    after = [line for line in before if not line.rpartition(" ")[2].startswith(mark)] + lines
    if after != before:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
        write_whole(file, "".join(f"{line}\n" for line in after))
        file.chmod(mode)


if __name__ == "__main__":
    serve(OverlayAgent())
