"""A node's part of an overlay: `python -m z2all_ds.cluster.overlay.node`, an agent that is started over ssh.

Tunnels and devices outlive the connection. A file in this user's temporary folder records them: pid and start time of
the tunnel's process, kind and address. The node's key is stored there, too. `down` removes only what that file names
and what carries our mark.
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
from z2all_ds.cluster.agents.agent import serve
from z2all_ds.cluster.overlay import devices
from z2all_ds.cluster.overlay.plan import DEVICE

CONNECT_SECONDS = 8
ALIVE_EVERY_SECONDS, ALIVE_TRIES = 5, 3
TUNNEL_SECONDS = 15.0
"""For ssh to connect and create its device."""
END_SECONDS = 5.0
VXLAN_PORT, VXLAN_ID = 4789, 213
CAP_NET_ADMIN = 12
TUN = Path("/dev/net/tun")
TOOLS = {"ssh": {"ip": "iproute2", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}}
TOOLS["vxlan"] = {"ip": "iproute2", "bridge": "iproute2"}


class OverlayAgent:
    """The requests, one method each. `name` is the node's name in the hostfile: nodes may share a temporary folder."""

    def check(self, name: str, kind: str, network: str) -> dict[str, Any]:
        """Return the state, and what this node lacks for an overlay as pairs of problem and fix."""
        missing = missing_for(kind)
        if not missing:
            other = devices.overlapping(network, but=DEVICE)
            if other:
                missing.append((f"{network} overlaps with {other}", "Choose another network with --network."))
            elif devices.exists(DEVICE) and not devices.is_ours(DEVICE):
                missing.append((f"has a device {DEVICE} that is not ours", "Delete or rename it."))
        # Equal for nodes that share one network stack, such as containers with host networking on one machine.
        namespace = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")
        user = pwd.getpwuid(os.getuid()).pw_name
        return {**self.state(name), "user": user, "missing": missing, "namespace": namespace}

    def state(self, name: str) -> dict[str, Any]:
        """Return the saved state, and whether the device exists and its tunnel, if any, runs."""
        saved = SavedState(name).read()
        is_up = bool(saved) and devices.is_ours(DEVICE)
        if is_up and "pid" in saved:
            is_up = process_is_alive(saved["pid"], saved["start_time"])
        return {"saved": saved, "is_up": is_up}

    def reaches(self, address: str) -> bool:
        return devices.reaches(address)

    # The hub

    def create_bridge(self, name: str, kind: str, network: str, address: str, prefix: int) -> None:
        saved = SavedState(name)
        if not saved.read():
            devices.delete_ours(DEVICE)  # of an unknown kind
        saved.write(kind=kind, network=network, address=address)
        if not devices.exists(DEVICE):
            devices.ip("link", "add", "name", DEVICE, "type", "bridge")
        devices.configure(DEVICE, address, prefix, devices.MTU[kind])

    def accept_keys(self, mark: str, lines: list[str]) -> None:
        """Accept these keys, and no others with that mark."""
        change_keys(mark, lines)

    def attach_tap(self, tap: str) -> bool:
        """Add the hub's end of a tunnel to the bridge; return False if it does not exist."""
        if not devices.wait_for(tap, TUNNEL_SECONDS / 2):
            return False
        devices.ip("link", "set", "dev", tap, "mtu", str(devices.MTU["ssh"]), "master", DEVICE, "up")
        return True

    def remove_tap(self, tap: str) -> None:
        """Remove the end of a dead tunnel; its sshd notices that the device is gone."""
        if devices.exists(tap) and devices.links()[tap].get("master") == DEVICE:
            devices.delete(tap)

    # The other nodes

    def public_key(self, name: str) -> str:
        """Return this node's public key for the tunnel; create the key if there is none."""
        saved = SavedState(name)
        saved.make_folder()
        key = saved.folder / "key"
        if not key.exists():
            devices.run_tool("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key))
        return key.with_name("key.pub").read_text(encoding="utf-8")

    def open_tunnel(self, name: str, hub: dict[str, Any], tap: int, **own: Any) -> str:
        """Start the tunnel to the hub; return ssh's error, empty after a success."""
        saved = SavedState(name)
        end_tunnel(saved.read())
        devices.delete_ours(DEVICE)
        with (saved.folder / "ssh.log").open("wb") as log:
            command, environment = tunnel_command(saved.folder, hub, tap), {**os.environ, "LC_ALL": "C"}
            process = start(command, environment, is_owned=False, stdout=log, stderr=log, cwd="/")  # it outlives us
        saved.write(**own, pid=process.pid, start_time=process_start_time(process.pid))
        deadline = time.monotonic() + TUNNEL_SECONDS
        while not devices.exists(f"tap{tap}"):
            if process.poll() is not None or time.monotonic() > deadline:
                return self.ssh_output(name) or f"no tunnel within {TUNNEL_SECONDS:.0f} s"
            time.sleep(0.05)
        try:
            devices.ip("link", "set", "dev", f"tap{tap}", "name", DEVICE)
            devices.configure(DEVICE, own["address"], own["prefix"], devices.MTU[own["kind"]])
        except OSError:
            # This end is created before the hub's: if the hub refuses, ssh ends and the device vanishes.
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
                return self.ssh_output(name)
            raise
        return ""

    def ssh_output(self, name: str) -> str:
        """Return what the tunnel's ssh has printed."""
        with suppress(OSError):
            return (SavedState(name).folder / "ssh.log").read_text(errors="replace")
        return ""

    # vxlan

    def create_vxlan(self, name: str, peers: dict[str, str], **own: Any) -> None:
        """Create the device. `peers`: overlay address -> outside address. All entries are static: no broadcasts."""
        SavedState(name).write(**own)
        devices.delete_ours(DEVICE)
        options = ("type", "vxlan", "id", str(VXLAN_ID), "dstport", str(VXLAN_PORT), "nolearning", "noudpcsum")
        devices.ip("link", "add", "name", DEVICE, *options)
        devices.configure(DEVICE, own["address"], own["prefix"], devices.MTU[own["kind"]])
        devices.disable_checksum_offload(DEVICE)
        for address, outside in peers.items():
            ip = str(socket.getaddrinfo(outside, VXLAN_PORT, socket.AF_INET, socket.SOCK_DGRAM)[0][4][0])
            hardware = devices.hardware_address(address)
            devices.run_tool("bridge", "fdb", "append", hardware, "dev", DEVICE, "dst", ip)
            devices.ip("neigh", "replace", address, "lladdr", hardware, "dev", DEVICE, "nud", "permanent")

    # All nodes

    def down(self, name: str, mark: str | None) -> None:
        """Remove everything. `mark`: mark of the keys to remove, on the hub."""
        saved = SavedState(name)
        end_tunnel(saved.read())
        devices.delete_ours(DEVICE)
        if mark:
            change_keys(mark, [])
        saved.remove()


class SavedState:
    """The state of the overlay that a node keeps between two commands."""

    def __init__(self, name: str) -> None:
        self.folder = private_temp_dir() / "overlay" / name

    def read(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / "state.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, **content: Any) -> None:
        self.make_folder()
        write_whole(self.folder / "state.json", json.dumps(content))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # it does not exist, or another node has a folder there, too
            self.folder.parent.rmdir()


def missing_for(kind: str) -> list[tuple[str, str]]:
    """Return what this node lacks for an overlay of a kind, as pairs of problem and fix."""
    found = []
    packages = sorted({package for tool, package in TOOLS[kind].items() if not devices.find_tool(tool)})
    if packages:
        found.append((f"no {', '.join(packages)}", f"Install it: `apt install {' '.join(packages)}`."))
    status = Path("/proc/self/status").read_text().splitlines()
    capabilities = next(line.split()[1] for line in status if line.startswith("CapEff:"))
    if not int(capabilities, 16) >> CAP_NET_ADMIN & 1:
        fix = "Be root there, and start the container with `docker run --cap-add NET_ADMIN --device /dev/net/tun`."
        found.append(("it may not create network devices (no CAP_NET_ADMIN)", fix))
    if kind == "ssh":
        try:
            os.close(os.open(TUN, os.O_RDWR))
        except OSError as error:
            why = "does not exist" if error.errno == errno.ENOENT else f"cannot be opened ({error.strerror})"
            found.append((f"{TUN} {why}", f"Start the container with `docker run --device {TUN}`."))
    return found


def tunnel_command(folder: Path, hub: dict[str, Any], tap: int) -> list[str]:
    """Return the ssh command of a tunnel. It does not read the user's config, which is for other connections."""
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
    flags = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    target = ("-p", str(hub["port"]), "-l", hub["user"], hub["address"])
    return ["ssh", "-F", "none", "-N", "-T", *flags, "-i", str(folder / "key"), "-w", f"{tap}:{tap}", *target]


def end_tunnel(state: dict[str, Any]) -> None:
    """End the saved process, not a later one with the same pid; its device vanishes with it."""
    if "pid" in state and process_is_alive(state["pid"], state["start_time"]):
        end_group_of(state["pid"])


def change_keys(mark: str, lines: list[str]) -> None:
    """Replace the lines with our mark in ~/.ssh/authorized_keys; all others stay."""
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
