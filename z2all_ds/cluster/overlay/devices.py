"""Network devices of this node, managed with the tool `ip`. Only devices with our mark are changed or deleted."""

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
"""Alias of all our devices."""
MTU = {"ssh": 9000, "vxlan": 1400}
"""Frames of a tunnel travel in a TCP stream, so any size works: 0.11-0.12 Gbit/s with 1400 and 0.25-0.41 with 9000, two
runs each on two cores with a load of 10. vxlan frames must fit into an MTU of 1500 with their headers (0.72-0.86
Gbit/s)."""
SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")
"""Where Debian has `ip`; not on the PATH of an ssh command."""
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17  # linux/sockios.h, linux/ethtool.h
REACH_SECONDS = 3.0


def find_tool(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS]))


def run_tool(name: str, *words: str) -> str:
    """Run a tool and return its stdout; raise OSError with the last line of its output."""
    done = subprocess.run([find_tool(name) or name, *words], capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise OSError(f"`{name} {' '.join(words)}` fails: {lines[-1] if lines else done.returncode}")
    return done.stdout


def ip(*words: str) -> None:
    run_tool("ip", *words)


def exists(device: str) -> bool:
    return any(name == device for _, name in socket.if_nameindex())


def is_ours(device: str) -> bool:
    return exists(device) and links().get(device, {}).get("ifalias") == MARK


def links() -> dict[str, dict[str, Any]]:
    """Return all devices by name, as `ip` reports them."""
    return {link["ifname"]: link for link in json.loads(run_tool("ip", "-json", "link", "show"))}


def configure(device: str, address: str, prefix: int, mtu: int) -> None:
    """Mark a device as ours, give it an address and set it up. The hardware address is derived from the address, so
    that it stays the same after a restart: other nodes cache it."""
    ip("link", "set", "dev", device, "alias", MARK)
    ip("link", "set", "dev", device, "address", hardware_address(address), "mtu", str(mtu), "addrgenmode", "none")
    ip("addr", "replace", f"{address}/{prefix}", "dev", device)
    ip("link", "set", "dev", device, "up")


def delete_ours(device: str) -> None:
    """Delete our device; if it is a bridge, also the ends of tunnels in it."""
    if is_ours(device):
        for name, link in links().items():
            if link.get("master") == device:
                delete(name)
        delete(device)


def delete(device: str) -> None:
    if exists(device):
        with suppress(OSError):  # it vanished with its process
            ip("link", "delete", "dev", device)


def wait_for(device: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not exists(device):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def hardware_address(address: str) -> str:
    """Return a locally administered address: 10.213.0.2 -> 02:00:0a:d5:00:02."""
    return ":".join(f"{byte:02x}" for byte in (2, 0, *ipaddress.IPv4Address(address).packed))


def disable_checksum_offload(device: str) -> None:
    """Do `ethtool -K DEVICE tx off`: NAT on the way breaks checksums that are left to the network card."""
    value = ctypes.create_string_buffer(struct.pack("II", ETHTOOL_STXCSUM, 0), 8)
    request = struct.pack("16sP16x", device.encode(), ctypes.addressof(value))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def overlapping(network: str, but: str) -> str:
    """Return a device other than `but` that has an address in this network, or an empty string."""
    wanted = ipaddress.ip_network(network)
    for link in json.loads(run_tool("ip", "-json", "-4", "addr", "show")):
        for entry in link.get("addr_info", []):
            there = ipaddress.ip_interface(f"{entry['local']}/{entry['prefixlen']}")
            if link["ifname"] != but and there.network.overlaps(wanted):
                return f"{link['ifname']} {there}"
    return ""


def reaches(address: str) -> bool:
    """Return whether packets come back from an address. A refused connection counts: nothing has to listen there."""
    try:
        socket.create_connection((address, 9), timeout=REACH_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
