"""The machines that a plan is for: from the user's options, with a line for every assumption about them."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from z2all_ds.base.errors import ConfigError
from z2all_ds.base.sizes import parse_size
from z2all_ds.plan.hardware import LINKS, REACHED, Link, Measured, gpu_named, link_named, parse_speed, read_measured
from z2all_ds.plan.traffic import HostTraffic

GPUS_PER_NODE = 8
INSIDE, BETWEEN = "pcie4", "eth100"
HOST_MEMORY_SPEED = 100e9
"""Bytes per second of the optimizer step on a machine's CPUs, for all its GPUs: reached by 16 cores for one H200."""
DISK_SPEED = 3e9
"""Bytes per second of a machine's disk, for all its GPUs. Assumed: about one NVMe disk at PCIe 3."""


@dataclass(frozen=True)
class Wishes:
    """The user's options; None where an option is not given. Sizes and speeds are texts with units."""

    gpus: int = 1
    gpu: str | None = None
    gpu_memory: str | None = None
    peak_tflops: float | None = None
    gpus_per_node: int | None = None
    link: str | None = None
    network: str | None = None
    adapters: int | None = None
    host_bus: str | None = None
    host_memory: str | None = None
    host_memory_speed: str | None = None
    disk_speed: str | None = None
    reached: float | None = None
    measured: Path | None = None


@dataclass(frozen=True)
class Network:
    """Links of the GPUs inside a machine and between machines."""

    gpus_per_node: int
    inside: Link
    between: Link
    adapters: int  # Adapters per machine, each with the speed of `between`

    def speed(self, gpus: int) -> float:
        """Return the bytes per second of each GPU's part of a ring. A machine uses all its adapters at once, with as
        many rings, but each GPU at most its own link."""
        inside = self.inside.usable
        return inside if gpus <= self.gpus_per_node else min(inside, self.between.usable * self.adapters)

    def latency(self, gpus: int) -> float:
        """Return the seconds of one empty call: a tree inside a machine, and a tree over machines there and back."""
        within = self.inside.latency * math.ceil(math.log2(max(2, min(gpus, self.gpus_per_node))))
        nodes = -(-gpus // self.gpus_per_node)
        return within + (2 * self.between.latency * math.ceil(math.log2(nodes)) if nodes > 1 else 0.0)


@dataclass(frozen=True)
class Host:
    """Speeds of each machine that an offload uses."""

    bus: Link = LINKS["pcie4"]  # Per GPU, in one direction
    memory: float = HOST_MEMORY_SPEED
    disk: float = DISK_SPEED

    def seconds(self, traffic: HostTraffic, gpus: int) -> float:
        """Return the time per step where `gpus` share memory and disk. Copies in both directions do not overlap."""
        over_bus = (traffic.to_host + traffic.to_gpu) / self.bus.usable
        on_disk = (traffic.disk_read + traffic.disk_written) / self.disk
        return over_bus + gpus * (traffic.stepped / self.memory + on_disk)


@dataclass(frozen=True)
class Fleet:
    """GPUs with their links and hosts."""

    gpus: int
    memory: int | None  # Per GPU
    peak: float | None  # 16-bit operations per second of one GPU; without it there are no times
    has_bf16: bool
    network: Network
    host: Host
    host_memory: int | None  # Per machine, for the ranks of all its GPUs
    reached: float | None  # Share of the peak, where the user gives it
    assumptions: tuple[str, ...]

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.network.gpus_per_node)

    def of_size(self, gpus: int) -> "Fleet":
        return replace(self, gpus=gpus)


def make_fleet(wishes: Wishes, option: str = "--gpus ") -> Fleet:
    """Check the wishes and fill in defaults. `option` is the name of the number of GPUs in error messages."""
    for name, count in (
        (option, wishes.gpus),
        ("--gpus-per-node ", wishes.gpus_per_node),
        ("--adapters ", wishes.adapters),
    ):
        if count is not None and count < 1:
            raise ConfigError(f"{name}{count}", "must be at least 1", "Give a positive number.")
    per_node = wishes.gpus_per_node or min(wishes.gpus, GPUS_PER_NODE)
    if wishes.gpus % per_node and wishes.gpus > per_node:
        rule = f"must be whole machines of {per_node}"
        raise ConfigError(f"{option}{wishes.gpus}", rule, "Give --gpus-per-node, or other numbers.")
    if wishes.peak_tflops is not None and not 0 < wishes.peak_tflops < 1e6:
        rule = "must be above 0 and below a million"
        raise ConfigError(f"--peak-tflops {wishes.peak_tflops}", rule, "989 is an H100's in 16 bits.")
    if wishes.reached is not None and not 0 < wishes.reached <= 1:
        rule = "must be above 0 and at most 1"
        raise ConfigError(f"--reached {wishes.reached}", rule, "0.55 is what an H200 reached.")
    gpu = gpu_named(wishes.gpu) if wishes.gpu is not None else None
    memory = parse_size(wishes.gpu_memory) if wishes.gpu_memory is not None else gpu.memory if gpu else None
    peak = wishes.peak_tflops * 1e12 if wishes.peak_tflops is not None else gpu.peak if gpu else None
    notes: list[str] = []
    if gpu:
        size = f"{(memory or 0) / 1e9:.1f} GB"
        notes.append(f"GPU {gpu.name}: {size}, {(peak or 0) / 1e12:,.0f} TFLOP/s in 16 bits at its peak.")
    measured = read_measured(wishes.measured) if wishes.measured else None
    return Fleet(
        gpus=wishes.gpus,
        memory=memory,
        peak=peak,
        has_bf16=gpu.has_bf16 if gpu else True,
        network=_network(wishes, measured, gpu.link if gpu else INSIDE, per_node, notes),
        host=_host(wishes, measured, notes),
        host_memory=parse_size(wishes.host_memory) if wishes.host_memory is not None else None,
        reached=wishes.reached,
        assumptions=tuple(notes),
    )


def _network(wishes: Wishes, measured: Measured | None, default_link: str, per_node: int, notes: list[str]) -> Network:
    inside = link_named(default_link if wishes.link is None else wishes.link)
    between = link_named(BETWEEN if wishes.network is None else wishes.network)
    if measured and measured.link and wishes.network is None:
        speed = measured.all_gather or measured.link.speed  # NCCL's speed before that of a single connection
        between = Link(f"what {measured.file} has measured", speed, measured.link.latency, is_reached=True)
    adapters = wishes.adapters or 1
    if wishes.gpus > 1:
        notes.append(
            f"{per_node} GPUs per machine, connected by {inside.name} ({inside.speed / 1e9:.0f} GB/s each way)."
        )
    if wishes.gpus > per_node:
        notes.append(
            f"Machines connected by {adapters} x {between.name} ({between.speed / 1e9:.1f} GB/s each way, "
            f"{between.latency * 1e6:.0f} us)."
        )
    if wishes.gpus > 1:
        notes.append(f"Messages reach {REACHED:.0%} of a link's speed, or all of one that was measured.")
    return Network(per_node, inside, between, adapters)


def _host(wishes: Wishes, measured: Measured | None, notes: list[str]) -> Host:
    disk = parse_speed(wishes.disk_speed) if wishes.disk_speed is not None else measured.disk if measured else None
    host = Host(
        bus=link_named(wishes.host_bus if wishes.host_bus is not None else "pcie4"),
        memory=HOST_MEMORY_SPEED if wishes.host_memory_speed is None else parse_speed(wishes.host_memory_speed),
        disk=disk or DISK_SPEED,
    )
    notes.append(
        f"Offload: {host.bus.name} to the host, {host.memory / 1e9:.0f} GB/s of host memory and {host.disk / 1e9:.1f}"
        " GB/s of disk for all GPUs of a machine together."
    )
    if wishes.host_memory is None:
        notes.append("Main memory is not checked without --host-memory; an offload needs much of it.")
    return host
