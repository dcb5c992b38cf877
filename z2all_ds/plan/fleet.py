"""The machines that a plan is for: as asked for, with a line for everything that was assumed about them."""

from dataclasses import dataclass, replace
from pathlib import Path

from z2all_ds.base.errors import ConfigError
from z2all_ds.base.sizes import parse_size
from z2all_ds.plan.hardware import REACHED, Link, gpu_named, link_named, parse_speed
from z2all_ds.plan.measured import Measured, read_measured
from z2all_ds.plan.timing import Host, Network

GPUS_PER_NODE = 8
INSIDE, BETWEEN = "pcie4", "eth100"


@dataclass(frozen=True)
class Wishes:
    """What the user says; None where nothing is said. Sizes and speeds are texts with units."""

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
class Fleet:
    """GPUs and the ways between them."""

    gpus: int
    memory: int | None
    """Of one GPU."""
    peak: float | None
    """16-bit operations a second of one GPU; without it nothing is said of time."""
    has_bf16: bool
    network: Network
    host: Host
    host_memory: int | None
    """Of one machine, for the ranks of all its GPUs."""
    reached: float | None
    """Share of the peak, where the user knows better than `speed.py`."""
    assumptions: tuple[str, ...]

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.network.gpus_per_node)

    def of_size(self, gpus: int) -> "Fleet":
        """The same kind of machines, more or fewer of them."""
        return replace(self, gpus=gpus)


def make_fleet(wishes: Wishes, option: str = "--gpus ") -> Fleet:
    """`option` is what the user calls the number of GPUs."""
    if wishes.gpus < 1:
        raise ConfigError(f"{option}{wishes.gpus}", "must be at least 1", "Give a positive number.")
    told: list[str] = []
    gpu = gpu_named(wishes.gpu) if wishes.gpu is not None else None
    memory = parse_size(wishes.gpu_memory) if wishes.gpu_memory is not None else gpu.memory if gpu else None
    peak = _peak(wishes.peak_tflops) if wishes.peak_tflops is not None else gpu.peak if gpu else None
    if gpu:
        size = f"{(memory or 0) / 1e9:.1f} GB"
        told.append(f"GPU {gpu.name}: {size}, {(peak or 0) / 1e12:,.0f} TFLOP/s in 16 bits at its peak.")
    per_node = wishes.gpus_per_node or min(wishes.gpus, GPUS_PER_NODE)
    if wishes.gpus_per_node is not None and wishes.gpus_per_node < 1:
        raise ConfigError(f"--gpus-per-node {wishes.gpus_per_node}", "must be at least 1", "Give a positive number.")
    if wishes.gpus % per_node and wishes.gpus > per_node:
        raise ConfigError(
            f"{option}{wishes.gpus}", f"must be whole machines of {per_node}", "Give --gpus-per-node, or other numbers."
        )
    measured = read_measured(wishes.measured) if wishes.measured else None
    network = _network(wishes, measured, gpu.link if gpu else INSIDE, per_node, told)
    host = _host(wishes, measured, told)
    if wishes.reached is not None and not 0 < wishes.reached <= 1:
        raise ConfigError(
            f"--reached {wishes.reached}", "must be above 0 and at most 1", "0.55 is what an H200 reached."
        )
    return Fleet(
        gpus=wishes.gpus,
        memory=memory,
        peak=peak,
        has_bf16=gpu.has_bf16 if gpu else True,
        network=network,
        host=host,
        host_memory=parse_size(wishes.host_memory) if wishes.host_memory is not None else None,
        reached=wishes.reached,
        assumptions=tuple(told),
    )


def _peak(tflops: float) -> float:
    if not 0 < tflops < 1e6:
        raise ConfigError(
            f"--peak-tflops {tflops}", "must be above 0 and below a million", "989 is an H100's in 16 bits."
        )
    return tflops * 1e12


def _network(wishes: Wishes, measured: Measured | None, default_link: str, per_node: int, told: list[str]) -> Network:
    inside = link_named(default_link if wishes.link is None else wishes.link)
    between = link_named(BETWEEN if wishes.network is None else wishes.network)
    if measured and measured.link and wishes.network is None:
        # NCCL's own word goes before that of a single connection.
        speed = measured.all_gather or measured.link.speed
        between = Link(f"what {measured.file} has measured", speed, measured.link.latency, is_reached=True)
    adapters = wishes.adapters or 1
    if wishes.adapters is not None and wishes.adapters < 1:
        raise ConfigError(f"--adapters {wishes.adapters}", "must be at least 1", "Give a positive number.")
    if wishes.gpus > 1:
        told.append(f"{per_node} GPUs a machine, joined by {inside.name} ({inside.speed / 1e9:.0f} GB/s each way).")
    if wishes.gpus > per_node:
        told.append(
            f"Machines joined by {adapters} x {between.name} ({between.speed / 1e9:.1f} GB/s each way, "
            f"{between.latency * 1e6:.0f} us)."
        )
    if wishes.gpus > 1:
        told.append(f"Messages reach {REACHED:.0%} of a link's speed, or all of one that was measured.")
    return Network(per_node, inside, between, adapters)


def _host(wishes: Wishes, measured: Measured | None, told: list[str]) -> Host:
    host = Host()
    if wishes.host_bus is not None:
        host = replace(host, bus=link_named(wishes.host_bus))
    if wishes.host_memory_speed is not None:
        host = replace(host, memory=parse_speed(wishes.host_memory_speed))
    if wishes.disk_speed is not None:
        host = replace(host, disk=parse_speed(wishes.disk_speed))
    elif measured and measured.disk:
        host = replace(host, disk=measured.disk)
    told.append(
        f"Offload: {host.bus.name} to the host, {host.memory / 1e9:.0f} GB/s of host memory and {host.disk / 1e9:.1f}"
        " GB/s of disk for all GPUs of a machine together."
    )
    if wishes.host_memory is None:
        told.append("Main memory is not compared with what ranks take of it (--host-memory): mind it with offload.")
    return host
