"""The process group of the ranks: rendezvous, and collectives of small Python objects.

The store of rank 0 has no authentication, so anyone who can reach it can join. Here it listens only on the address that
was given to the other ranks; torch's own env:// opens it on all addresses.
"""

import errno
import ipaddress
import os
import socket
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from z2all_ds.base.errors import PortTaken
from z2all_ds.base.world import World

T = TypeVar("T")


def join(world: World, device: torch.device, timeout: timedelta) -> None:
    """Join the other ranks; a single rank forms a group of one on a port chosen by the system."""
    if dist.is_initialized():  # by an earlier training in this process
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    # A group bound to its device is created at once, and later groups are split from it; not needed for one rank.
    own_device = device if device.type == "cuda" and world.world_size > 1 else None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun itself holds the store
        dist.init_process_group(backend, timeout=timeout, device_id=own_device)
        return
    store = _store(world, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout)
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout, device_id=own_device
    )


def _store(world: World, address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    try:
        listening = listen(address, port) if world.is_main else None
        free_port = listening.getsockname()[1] if listening else port
        descriptor = listening.detach() if listening else None
        return dist.TCPStore(address, free_port, world.world_size, world.is_main, timeout, master_listen_fd=descriptor)
    except (OSError, dist.DistNetworkError) as error:
        if "EADDRINUSE" not in str(error) and getattr(error, "errno", None) != errno.EADDRINUSE:
            raise
        raise PortTaken(f"port {port}", "in use by another process", "Set another --master_port.") from None


def listen(address: str, port: int) -> socket.socket | None:
    """Listen on this address only. Return None (all addresses) if it is a host name, which may resolve differently on
    another machine, or an external address that this machine does not have itself."""
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        return None
    try:
        return socket.create_server((address, port), family=socket.AF_INET6 if version == 6 else socket.AF_INET)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise


def gathered(value: T) -> list[T]:
    """Return the values of all ranks, on every rank."""
    found: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found  # type: ignore[return-value]  # none is left out


def from_rank_0(value: T) -> T:
    """Return the value of rank 0, on every rank."""
    found: list[T] = [value]
    dist.broadcast_object_list(found, src=0)
    return found[0]
