"""The worker of the health test: `python -m z2all_ds.cluster.preflight.health_worker`, one per node, held by its agent.

Orders come on stdin, answers go to stdout, as messages of `base/child_process.py`. Each meeting is a small world
of its own, with its own store on its first member, so that one that fails leaves the others and the next ones alone.
Matmuls run on every GPU of the node, messages on the first one: NICs and cables belong to the node, not to a GPU.
"""

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from z2all_ds.base.child_process import read_messages, write_message
from z2all_ds.base.parent_watch import follow_owner

CPU = torch.device("cpu")
PATIENCE = timedelta(seconds=5)
"""For a partner to come, and for each message; all are told to begin at the same moment."""
MATMUL_SECONDS = 0.3
"""On each device: a container's share of a processor is dealt out in tenths of a second, full speed and standstill."""
GATHERS = 3
SIZES = {"cpu": (512, torch.float32, 4 << 20), "cuda": (8192, torch.bfloat16, 64 << 20)}
"""Rows of a matrix, its type, bytes of a message: some tens of milliseconds of work, so that two rounds are short."""


class Health:
    """What can be ordered; one method an order."""

    def __init__(self) -> None:
        self._stores: list[dist.TCPStore] = []

    def open(self, address: str, port: int, interface: str) -> dict[str, Any]:
        """A store for the meetings that this node is the first member of; port 0 lets the system choose."""
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a message that is late raises here instead of ending the process
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # By itself the store would listen on all addresses of the machine, and asks nobody for a password.
        listening = socket.create_server((address, port), family=family)
        port = int(listening.getsockname()[1])
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            timeout=PATIENCE,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self._stores.append(store)
        has_gpu = torch.cuda.is_available() and dist.is_nccl_available()
        return {"port": port, "device": "cuda" if has_gpu else "cpu"}

    def compute(self, device: str) -> dict[str, float]:
        """Matmuls, alone; the slowest device of the node counts."""
        return {"matmul_ms": max(_matmul_ms(each) for each in _devices(device))}

    def meet(self, device: str, **where: Any) -> dict[str, float]:
        """All-gathers with the partner."""
        with _world(device, **where) as ours:
            seconds, count = _gather(ours, where["rank"], where["size"])
        return {"gather_gbps": count / seconds / 1e9}

    def reduce(self, device: str, **where: Any) -> dict[str, float]:
        """One sum over all nodes, of whole numbers, so that it is right or wrong and never nearly right."""
        with _world(device, **where) as ours:
            numbers = torch.arange(1024, device=ours) * (where["rank"] + 1)
            started = time.perf_counter()
            dist.all_reduce(numbers)
            _finish(ours)
            took = time.perf_counter() - started
            size = where["size"]
            if not torch.equal(numbers, torch.arange(1024, device=ours) * (size * (size + 1) // 2)):
                raise ValueError(f"the sum over {size} nodes is wrong here")
        return {"ms": took * 1e3}


def _devices(kind: str) -> list[torch.device]:
    return [torch.device(kind, number) for number in range(torch.cuda.device_count())] if kind == "cuda" else [CPU]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matmul_ms(device: torch.device) -> float:
    """Mean, for the median of one that is stopped now and then is that of one that is not. The first does not count: in
    it libraries get ready."""
    rows, dtype, _ = SIZES[device.type]
    # Small whole numbers: their sums are exact in any order, so equal products are equal to the bit.
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
    """Seconds of one all-gather (median), and the bytes that came from others in it."""
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
            raise ValueError("what the partner sent has arrived changed")
    return statistics.median(times[1:]), count * 4 * (size - 1)  # in the first one they wait for each other


@contextmanager
def _world(kind: str, name: str, rank: int, size: int, address: str, port: int) -> Iterator[torch.device]:
    """The members of one meeting, by the store at this address; yields the device for messages."""
    device = _devices(kind)[0]
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore(address, port, is_master=False, timeout=PATIENCE, wait_for_workers=False)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=size,
        timeout=PATIENCE,
    )
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _in_words(error: Exception) -> str:
    """One line; torch's own goes on with where in its C++ it happened."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, dist.DistStoreError) and "timeout" in lines[0]:
        return f"nobody else came within {PATIENCE.total_seconds():.0f} s"
    return f"{type(error).__name__}: {lines[0][:300]}"


def main() -> None:
    follow_owner()
    health = Health()
    for order in read_messages(sys.stdin):
        method: Callable[..., Any] = getattr(health, order.pop("do"))
        try:
            reply = {"answer": method(**order)}
        except Exception as error:  # whatever it is, it is the answer
            reply = {"problem": _in_words(error)}
        write_message(sys.stdout, reply)


if __name__ == "__main__":
    main()
