"""Network devices of this node, by the tool `ip`. Only those that carry our mark are ever changed or deleted."""

import ctypes
import fcntl
import ipaddress
import json
import os
import shutil
import socket
import struct
import subprocess
import time
from contextlib import suppress
from typing import Any

MARK = "z2all-overlay"
"""Alias of every device of ours."""
MTU = {"ssh": 9000, "vxlan": 1400}
"""A tunnel's frames travel in a stream, which has no limit of its own: 0.11-0.12 Gbit/s with 1400 and 0.25-0.41 with
9000, two tries each on two cores with a load of 10. Those of vxlan must fit into a network of 1500 with their headers
(0.72-0.86 Gbit/s there)."""
SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")
"""Where `ip` is in Debian, and where the PATH of an ssh command does not look."""
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17  # linux/sockios.h, linux/ethtool.h
REACH_SECONDS = 3.0


def find_tool(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS]))


def run_tool(name: str, *words: str) -> str:
    """What it prints; OSError with its own last line where it fails."""
    done = subprocess.run([find_tool(name) or name, *words], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise OSError(f"`{name} {' '.join(words)}` fails: {said[-1] if said else done.returncode}")
    return done.stdout


def ip(*words: str) -> None:
    run_tool("ip", *words)


def exists(device: str) -> bool:
    return any(name == device for _, name in socket.if_nameindex())


def is_ours(device: str) -> bool:
    return exists(device) and links().get(device, {}).get("ifalias") == MARK


def links() -> dict[str, dict[str, Any]]:
    """All devices by name, as `ip` tells them."""
    return {link["ifname"]: link for link in json.loads(run_tool("ip", "-json", "link", "show"))}


def hold_address(device: str, address: str, prefix: int, mtu: int) -> None:
    """Ours from now on, up, with this address. Its hardware address follows, so that it is the same after a restart:
    the others remember it for a while."""
    ip("link", "set", "dev", device, "alias", MARK)
    ip("link", "set", "dev", device, "address", hardware_address(address), "mtu", str(mtu), "addrgenmode", "none")
    ip("addr", "replace", f"{address}/{prefix}", "dev", device)
    ip("link", "set", "dev", device, "up")


def delete_ours(device: str) -> None:
    """With its slaves, if it is a bridge; they are ends of tunnels."""
    if is_ours(device):
        for name, link in links().items():
            if link.get("master") == device:
                delete(name)
        delete(device)


def delete(device: str) -> None:
    if exists(device):
        with suppress(OSError):  # its process has just ended, and it with it
            ip("link", "delete", "dev", device)


def wait_for(device: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not exists(device):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def hardware_address(address: str) -> str:
    """10.213.0.2 -> 02:00:0a:d5:00:02, in the range that is free for everybody."""
    return ":".join(f"{byte:02x}" for byte in (2, 0, *ipaddress.IPv4Address(address).packed))


def checksums_in_software(device: str) -> None:
    """As `ethtool -K DEVICE tx off`: NAT on the way spoils checksums that are left to the card behind a tunnel."""
    value = ctypes.create_string_buffer(struct.pack("II", ETHTOOL_STXCSUM, 0), 8)
    request = struct.pack("16sP16x", device.encode(), ctypes.addressof(value))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def overlapping(network: str, but: str) -> str:
    """The device other than `but` that has an address in this network, or empty."""
    wanted = ipaddress.ip_network(network)
    for link in json.loads(run_tool("ip", "-json", "-4", "addr", "show")):
        for entry in link.get("addr_info", []):
            there = ipaddress.ip_interface(f"{entry['local']}/{entry['prefixlen']}")
            if link["ifname"] != but and there.network.overlaps(wanted):
                return f"{link['ifname']} {there}"
    return ""


def answers(address: str) -> bool:
    """Whether packets come back from there. A refused connection is an answer, too: nobody has to listen."""
    try:
        socket.create_connection((address, 9), timeout=REACH_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
