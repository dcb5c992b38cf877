"""The worker of the health test: `python -m z2all_ds.cluster.preflight.health_worker`, started by a node's agent.

Reads orders from stdin and writes answers to stdout, as messages of `base/child_process.py`. Each exchange has its own
process group, with a store on its first member, so that a failure does not affect other exchanges. Matmuls run on every
GPU of the node, messages on the first one: NICs and cables belong to the node, not to a GPU.
"""

import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from z2all_ds.base.child_process import read_messages, write_message
from z2all_ds.base.parent_watch import follow_owner

CPU = torch.device("cpu")
PATIENCE = timedelta(seconds=5)
"""For the partner to connect, and for each message; all workers get their orders at the same moment."""
MATMUL_SECONDS = 0.3
"""Per device: the CPU quota of a container applies per tenth of a second, with full speed and standstill in turn."""
GATHERS = 3
SIZES = {"cpu": (512, torch.float32, 4 << 20), "cuda": (8192, torch.bfloat16, 64 << 20)}
"""Rows of a matrix, its dtype, bytes of a message: some tens of milliseconds of work."""


class HealthWorker:
    """The orders, one method each."""

    def __init__(self) -> None:
        self._stores: list[dist.TCPStore] = []

    def open(self, address: str, port: int, interface: str) -> dict[str, Any]:
        """Open a store for exchanges in which this node is the first member; port 0 lets the system choose."""
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a message that is late raises here instead of ending the process
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # By default the store would listen on all addresses of the machine, without authentication.
        listening = socket.create_server((address, port), family=family)
        port = int(listening.getsockname()[1])
        options: dict[str, Any] = {
            "timeout": PATIENCE,
            "wait_for_workers": False,
            "master_listen_fd": listening.detach(),
        }
        self._stores.append(dist.TCPStore(address, port, is_master=True, **options))
        has_gpu = torch.cuda.is_available() and dist.is_nccl_available()
        return {"port": port, "device": "cuda" if has_gpu else "cpu"}

    def compute(self, device: str) -> dict[str, float]:
        """Multiply matrices; return the time of the slowest device of the node."""
        return {"matmul_ms": max(_matmul_ms(each) for each in _devices(device))}

    def exchange(self, device: str, **group: Any) -> dict[str, float]:
        """All-gathers with the partner."""
        with _process_group(device, **group) as ours:
            seconds, count = _gather(ours, group["rank"], group["size"])
        return {"gather_gbps": count / seconds / 1e9}

    def reduce(self, device: str, **group: Any) -> dict[str, float]:
        """All-reduce one vector of integers over all nodes, whose sum is exact."""
        with _process_group(device, **group) as ours:
            numbers = torch.arange(1024, device=ours) * (group["rank"] + 1)
            started = time.perf_counter()
            dist.all_reduce(numbers)
            _finish(ours)
            took = time.perf_counter() - started
            size = group["size"]
            if not torch.equal(numbers, torch.arange(1024, device=ours) * (size * (size + 1) // 2)):
                raise ValueError(f"the sum over {size} nodes is wrong here")
        return {"ms": took * 1e3}


def _devices(kind: str) -> list[torch.device]:
    return [torch.device(kind, number) for number in range(torch.cuda.device_count())] if kind == "cuda" else [CPU]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matmul_ms(device: torch.device) -> float:
    """Return the mean, since the median hides a device that stops now and then. The first product is not timed: it
    includes the initialization of libraries."""
    rows, dtype, _ = SIZES[device.type]
    # Small integers: their sums are exact in any order, so equal products are bit-identical.
    left, right = (torch.randint(0, 4, (rows, rows), device=device).to(dtype) for _ in range(2))
    expected = left @ right
    times: list[float] = []
    while sum(times) < MATMUL_SECONDS:
        _finish(device)
        started = time.perf_counter()
        product = left @ right
        _finish(device)
        times.append(time.perf_counter() - started)
        if not torch.equal(product, expected):
            raise ValueError(f"two equal matmuls on {device} differ: its memory or its arithmetic is broken")
    return statistics.fmean(times) * 1e3


def _gather(device: torch.device, rank: int, size: int) -> tuple[float, int]:
    """Return the median seconds of an all-gather, and the bytes received in it."""
    count = SIZES[device.type][2] // 4
    parts = [torch.empty(count, dtype=torch.int32, device=device) for _ in range(size)]
    numbers = torch.arange(count, dtype=torch.int32, device=device)
    times = []
    for _ in range(GATHERS + 1):
        started = time.perf_counter()
        dist.all_gather(parts, numbers + rank)
        _finish(device)
        times.append(time.perf_counter() - started)
    for other, part in enumerate(parts):
        if not torch.equal(part, numbers + other):
            raise ValueError("the partner's data arrived changed")
    return statistics.median(times[1:]), count * 4 * (size - 1)  # the first one includes the wait for the partner


@contextmanager
def _process_group(kind: str, name: str, rank: int, size: int, address: str, port: int) -> Iterator[torch.device]:
    """Join a process group through the store at this address; yield the device for messages."""
    device = _devices(kind)[0]
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore(address, port, is_master=False, timeout=PATIENCE, wait_for_workers=False)
    backend, prefixed = "nccl" if kind == "cuda" else "gloo", dist.PrefixStore(name, store)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=size, timeout=PATIENCE)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _one_line(error: Exception) -> str:
    """Return the first line of an error; torch appends a C++ stack."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, dist.DistStoreError) and "timeout" in lines[0]:
        return f"no other node connected within {PATIENCE.total_seconds():.0f} s"
    return f"{type(error).__name__}: {lines[0][:300]}"


def main() -> None:
    follow_owner()
    worker = HealthWorker()
    for order in read_messages(sys.stdin):
        try:
            reply = {"answer": getattr(worker, order.pop("do"))(**order)}
        except Exception as error:  # reported to the agent
            reply = {"problem": _one_line(error)}
        write_message(sys.stdout, reply)


if __name__ == "__main__":
    main()
