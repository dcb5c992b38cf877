"""How long a step takes at best and at worst: computing and sending at the same time, or one after the other.

An offload's copies, its step on the CPU and its disk are taken to be waited for: at stage 2 they run on the stream of
the backward pass or after it, and at stage 3 copies of weights to the GPU hold up the host.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from z2all_ds.base.errors import ConfigError
from z2all_ds.plan.hardware import LINKS, Link
from z2all_ds.plan.traffic import Collective, HostTraffic

HOST_MEMORY_SPEED = 100e9
"""Bytes a second at which the optimizer steps on a machine's CPUs, for all of its GPUs together: what 16 cores did for
one H200 (ZeRO-2 with offload). A machine with two sockets has more, a desktop less."""
DISK_SPEED = 3e9
"""Bytes a second that a machine's disk reads or writes, for all of its GPUs together. Assumed, not measured: about what
one NVMe disk at PCIe 3 is sold with."""


@dataclass(frozen=True)
class Network:
    """What GPUs send over: inside a machine, and between machines."""

    gpus_per_node: int
    inside: Link
    between: Link
    adapters: int
    """For which `between` is the speed of one, in each machine."""

    def __post_init__(self) -> None:
        for name, count in (("GPUs per node", self.gpus_per_node), ("network adapters", self.adapters)):
            if count < 1:
                raise ConfigError(f"{name} = {count}", "must be at least 1", "Give a positive number.")

    def speed(self, gpus: int) -> float:
        """Bytes a second at which each GPU's part of a ring moves. A machine's GPUs go out in as many rings at once as
        there are adapters, so that its whole network counts, but never more than the GPUs' own links."""
        inside = self.inside.usable
        return inside if gpus <= self.gpus_per_node else min(inside, self.between.usable * self.adapters)

    def latency(self, gpus: int) -> float:
        """Of one call: by a tree over the machines, and once around inside one."""
        within = self.inside.latency * math.ceil(math.log2(max(2, min(gpus, self.gpus_per_node))))
        nodes = -(-gpus // self.gpus_per_node)
        return within + (2 * self.between.latency * math.ceil(math.log2(nodes)) if nodes > 1 else 0.0)


@dataclass(frozen=True)
class Host:
    """What an offload goes over, in each machine."""

    bus: Link = LINKS["pcie4"]
    """Of each GPU, in one direction."""
    memory: float = HOST_MEMORY_SPEED
    disk: float = DISK_SPEED

    def __post_init__(self) -> None:
        for name, speed in (("host bus", self.bus.speed), ("host memory", self.memory), ("disk", self.disk)):
            if not (math.isfinite(speed) and speed > 0):
                raise ConfigError(f"speed of the {name} = {speed}", "must be above 0", "Give bytes a second.")

    def seconds(self, traffic: HostTraffic, gpus: int) -> float:
        """A step, where `gpus` of a machine share its memory and disk. Copies one way and the other are taken to come
        one after the other, as the backward pass asks for them."""
        over_bus = (traffic.to_host + traffic.to_gpu) / self.bus.usable
        on_disk = (traffic.disk_read + traffic.disk_written) / self.disk
        return over_bus + gpus * (traffic.stepped / self.memory + on_disk)


@dataclass(frozen=True)
class StepTime:
    """Of one optimizer step, in seconds."""

    compute: float
    hidden: float
    """Sending that DeepSpeed runs beside computing, if there is enough of that."""
    exposed: float
    """Sending that is waited for, and all of an offload."""

    @property
    def least(self) -> float:
        return max(self.compute, self.hidden) + self.exposed

    @property
    def most(self) -> float:
        return self.compute + self.hidden + self.exposed


def sending(collective: Collective, network: Network) -> float:
    """Seconds a step. A group's ranks are neighbours: where it is no larger than a machine, it is inside one."""
    if collective.among == 1:
        return 0.0
    latency = collective.times * collective.calls * network.latency(collective.among)
    return collective.sent() / network.speed(collective.among) + latency


def step_time(
    operations: float,
    peak: float,
    collectives: Sequence[Collective],
    gpus: int,
    network: Network,
    reached: float = 1.0,
    offload: HostTraffic = HostTraffic(),
    host: Host = Host(),
) -> StepTime:
    """`operations` are those that one GPU executes in a step, at `reached` of its peak; `gpus` are all of the run's."""
    if not 0 < reached <= 1:
        raise ConfigError(f"share of the peak = {reached}", "must be above 0 and at most 1", "0.55 is what we reach.")
    if gpus < 1:
        raise ConfigError(f"number of GPUs = {gpus}", "must be at least 1", "Give a positive number.")
    if not (math.isfinite(peak) and peak > 0):
        raise ConfigError(f"peak = {peak}", "must be above 0", "Give operations a second.")
    times = [(one.beside_compute, sending(one, network)) for one in collectives]
    return StepTime(
        compute=operations / (peak * reached),
        hidden=sum(seconds for beside, seconds in times if beside),
        exposed=sum(seconds for beside, seconds in times if not beside)
        + host.seconds(offload, min(gpus, network.gpus_per_node)),
    )
