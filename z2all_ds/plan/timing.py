"""How long a step takes at best and at worst: computing and sending at the same time, or one after the other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from z2all_ds.errors import ConfigError
from z2all_ds.plan.hardware import REACHED, Link
from z2all_ds.plan.traffic import Collective

REACHED_OF_PEAK = 0.55
"""Share of a GPU's peak that our training computes at: 0.54 to 0.56 on an H200 (1.26 B, ZeRO-1, exact count)."""


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
        inside = REACHED * self.inside.speed
        return inside if gpus <= self.gpus_per_node else min(inside, REACHED * self.between.speed * self.adapters)

    def latency(self, gpus: int) -> float:
        """Of one call: by a tree over the machines, and once around inside one."""
        within = self.inside.latency * math.ceil(math.log2(max(2, min(gpus, self.gpus_per_node))))
        nodes = -(-gpus // self.gpus_per_node)
        return within + (2 * self.between.latency * math.ceil(math.log2(nodes)) if nodes > 1 else 0.0)


@dataclass(frozen=True)
class StepTime:
    """Of one optimizer step, in seconds."""

    compute: float
    hidden: float
    """Sending that DeepSpeed runs beside computing, if there is enough of that."""
    exposed: float
    """Sending that is waited for."""

    @property
    def least(self) -> float:
        return max(self.compute, self.hidden) + self.exposed

    @property
    def most(self) -> float:
        return self.compute + self.hidden + self.exposed


def sending(collective: Collective, gpus: int, network: Network) -> float:
    """Seconds a step."""
    if gpus == 1:
        return 0.0
    return collective.sent(gpus) / network.speed(gpus) + collective.times * collective.calls * network.latency(gpus)


def step_time(
    operations: float, peak: float, collectives: Sequence[Collective], gpus: int, network: Network, reached: float
) -> StepTime:
    """`operations` are those that one GPU executes in a step."""
    if not 0 < reached <= 1:
        raise ConfigError(f"share of the peak = {reached}", "must be above 0 and at most 1", "0.55 is what we reach.")
    times = {one: sending(one, gpus, network) for one in collectives}
    return StepTime(
        compute=operations / (peak * reached),
        hidden=sum(seconds for one, seconds in times.items() if one.beside_compute),
        exposed=sum(seconds for one, seconds in times.items() if not one.beside_compute),
    )
