"""One ZeRO JSON with one micro-batch on a fleet: its memory, what it sends, and how long a step takes."""

from dataclasses import dataclass
from functools import cached_property

from z2all_ds.base.accounting import FLOP_CONVENTIONS, flops_per_token, hardware_flops_per_token
from z2all_ds.base.config import RunConfig
from z2all_ds.plan.fleet import Fleet
from z2all_ds.plan.gpu_memory import GpuMemory, gpu_memory, graphs_are_used, ops_of
from z2all_ds.plan.speed import reached_share
from z2all_ds.plan.timing import StepTime, step_time
from z2all_ds.plan.traffic import Collective, HostTraffic, collectives, host_traffic
from z2all_ds.zero.ds_config import ResolvedDeepSpeed, resolve


@dataclass(frozen=True)
class Estimate:
    """Of one optimizer step on one of the fleet's GPUs, where nothing else is said."""

    run: RunConfig
    resolved: ResolvedDeepSpeed
    fleet: Fleet
    memory: GpuMemory
    collectives: tuple[Collective, ...]
    offload: HostTraffic
    time: StepTime | None
    """None where the GPU's speed is not known: no GPU was named, or weights are fp32."""
    reached: float | None
    """Share of the peak that was counted with."""

    @property
    def name(self) -> str:
        return self.run.deepspeed

    @property
    def micro_batch(self) -> int:
        return self.run.train.micro_batch

    @property
    def left(self) -> int | None:
        """Bytes of the GPU's memory; negative where it does not fit, None where the memory is not known."""
        return None if self.fleet.memory is None else self.fleet.memory - self.memory.total

    @property
    def host_bytes(self) -> int:
        """Of main memory, by all ranks of a machine."""
        return self.memory.host * min(self.fleet.gpus, self.fleet.network.gpus_per_node)

    @property
    def fits(self) -> bool:
        """Into the GPU and into main memory, as far as these are known."""
        in_host = self.fleet.host_memory is None or self.host_bytes <= self.fleet.host_memory
        return in_host and (self.left is None or self.left >= 0)

    @cached_property
    def sent(self) -> float:
        """Bytes that a rank sends in a step."""
        return sum(one.sent() for one in self.collectives)

    @property
    def tokens_per_step(self) -> int:
        return self.run.train.global_batch * self.run.train.sequence_length

    def mfu(self, seconds: float, convention: str) -> float | None:
        """Of a step that takes so long."""
        if self.fleet.peak is None:
            return None
        flops = flops_per_token(self.run.model.shape, self.run.train.sequence_length, convention)
        return self.tokens_per_step * flops / (seconds * self.fleet.peak * self.fleet.gpus)

    def utilisations(self) -> dict[str, tuple[float, float]]:
        """By each convention, at the longest and at the shortest step time."""
        if self.time is None:
            return {}
        bounds = (self.time.most, self.time.least)
        return {name: tuple(self.mfu(bound, name) for bound in bounds) for name in FLOP_CONVENTIONS}  # type: ignore[misc]

    def days(self, tokens: int) -> tuple[float, float] | None:
        """Without failures: (at least, at most)."""
        if self.time is None:
            return None
        steps = tokens / self.tokens_per_step
        return steps * self.time.least / 86400, steps * self.time.most / 86400


def estimate(run: RunConfig, fleet: Fleet) -> Estimate:
    """`run.deepspeed` names the JSON."""
    resolved = resolve(run, fleet.gpus, "cuda", elsewhere=True)
    shape, train, ops = run.model.shape, run.train, ops_of(run, resolved)
    sends = tuple(collectives(resolved, shape, fleet.gpus))
    offload = host_traffic(resolved, shape, fleet.gpus)
    per_token = hardware_flops_per_token(
        shape, train.sequence_length, train.activation_checkpointing, train.recompute, ops["cross_entropy"]
    )
    reached = time = None
    if fleet.peak is not None and resolved.dtype != "fp32":
        tokens = train.micro_batch * train.sequence_length
        reached = fleet.reached or reached_share(tokens, resolved.stage, graphs_are_used(run, resolved), ops)
        on_one_gpu = per_token * train.global_batch * train.sequence_length / fleet.gpus
        time = step_time(
            on_one_gpu, fleet.peak, sends, fleet.gpus, fleet.network, reached, offload=offload, host=fleet.host
        )
    return Estimate(run, resolved, fleet, gpu_memory(run, resolved, fleet.gpus), sends, offload, time, reached)
