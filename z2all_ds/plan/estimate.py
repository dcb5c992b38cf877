"""One ZeRO JSON with one micro-batch on a fleet: memory, traffic, and the time of a step.

A step takes at least the time with all overlap that DeepSpeed allows, at most compute plus communication. All of an
offload counts as waited for: at stage 2 its copies run on the stream of the backward pass or after it, and at stage 3
copies of weights to the GPU block the host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from z2all_ds.base.accounting import FLOP_CONVENTIONS, flops_per_token, hardware_flops_per_token
from z2all_ds.base.config import RunConfig
from z2all_ds.plan.fleet import Fleet, Host, Network
from z2all_ds.plan.memory import GpuMemory, gpu_memory, graphs_are_used, ops_of
from z2all_ds.plan.traffic import Collective, HostTraffic, collectives, host_traffic
from z2all_ds.zero.ds_config import ResolvedDeepSpeed, resolve

IN_GRAPHS, LAUNCHED, AT_STAGE_3 = 0.556, 0.525, 0.506
"""Exact operations over the 16-bit peak: ZeRO-1 with CUDA graphs, ZeRO-1 and 2 without, ZeRO-3 (whose hooks cost time).
Measured on one H200 with z2all_1b and the default ops (docs/results/2026-11-15_h200_bench_step_*.jsonl)."""
TOKENS_LOST = 160
"""Constant cost of a micro-batch, in tokens: 4,096 tokens ran at 97 % of the rate of 16,384."""
IN_8_BITS = 1.24
"""Speed-up with ops.linear=fp8."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step."""

    compute: float
    hidden: float  # Communication that DeepSpeed overlaps with compute, if there is enough compute
    exposed: float  # Communication that is waited for, and all of an offload

    @property
    def least(self) -> float:
        return max(self.compute, self.hidden) + self.exposed

    @property
    def most(self) -> float:
        return self.compute + self.hidden + self.exposed

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "least": self.least, "most": self.most}


def sending(collective: Collective, network: Network) -> float:
    """Return the seconds per step. Ranks of a group are neighbours: a group no larger than a machine is inside one."""
    if collective.among == 1:
        return 0.0
    latency = collective.times * collective.calls * network.latency(collective.among)
    return collective.sent() / network.speed(collective.among) + latency


def step_time(
    compute: float, sent: Sequence[Collective], gpus: int, network: Network, offload: HostTraffic, host: Host
) -> StepTime:
    """Return the time of a step with `compute` seconds of computing on a run of `gpus`."""
    times = [(one.beside_compute, sending(one, network)) for one in sent]
    return StepTime(
        compute=compute,
        hidden=sum(seconds for overlaps, seconds in times if overlaps),
        exposed=sum(seconds for overlaps, seconds in times if not overlaps)
        + host.seconds(offload, min(gpus, network.gpus_per_node)),
    )


def reached_share(tokens: int, stage: int, graphs: bool, ops: Mapping[str, str]) -> float:
    """Return the share of the peak that micro-batches of `tokens` reach. On a GPU other than an H200 an assumption."""
    share = IN_GRAPHS if graphs else AT_STAGE_3 if stage == 3 else LAUNCHED
    faster = IN_8_BITS if ops["linear"] != "torch" else 1.0
    return min(1.0, share * faster * tokens / (tokens + TOKENS_LOST))


@dataclass(frozen=True)
class Estimate:
    """One optimizer step; figures are per GPU where nothing else is stated."""

    run: RunConfig
    resolved: ResolvedDeepSpeed
    fleet: Fleet
    memory: GpuMemory
    collectives: tuple[Collective, ...]
    offload: HostTraffic
    time: StepTime | None  # None where the speed is not known: no GPU is named, or weights are fp32
    reached: float | None  # Share of the peak that `time` assumes

    @property
    def name(self) -> str:
        return self.run.deepspeed

    @property
    def micro_batch(self) -> int:
        return self.run.train.micro_batch

    @property
    def left(self) -> int | None:
        """Return the free bytes of the GPU; negative if it does not fit, None if the memory is not known."""
        return None if self.fleet.memory is None else self.fleet.memory - self.memory.total

    @property
    def host_bytes(self) -> int:
        """Return the main memory that all ranks of a machine need."""
        return self.memory.host * min(self.fleet.gpus, self.fleet.network.gpus_per_node)

    @property
    def fits(self) -> bool:
        """Return whether GPU and main memory suffice, as far as they are known."""
        in_host = self.fleet.host_memory is None or self.host_bytes <= self.fleet.host_memory
        return in_host and (self.left is None or self.left >= 0)

    @cached_property
    def sent(self) -> float:
        """Return the bytes that a rank sends per step."""
        return sum(one.sent() for one in self.collectives)

    @property
    def over_bus(self) -> int:
        """Return the bytes that an offload copies between GPU and host per step."""
        return self.offload.to_host + self.offload.to_gpu

    @property
    def tokens_per_step(self) -> int:
        return self.run.train.global_batch * self.run.train.sequence_length

    def utilisations(self) -> dict[str, tuple[float, float]]:
        """Return the MFU by each convention at the longest and at the shortest step time."""
        if self.time is None or self.fleet.peak is None:
            return {}
        peak, gpus, bounds = self.fleet.peak, self.fleet.gpus, (self.time.most, self.time.least)
        found = {}
        for name in FLOP_CONVENTIONS:
            flops = flops_per_token(self.run.model.shape, self.run.train.sequence_length, name)
            low, high = (self.tokens_per_step * flops / (seconds * peak * gpus) for seconds in bounds)
            found[name] = (low, high)
        return found


def estimate(run: RunConfig, fleet: Fleet) -> Estimate:
    """Estimate the run with the JSON that `run.deepspeed` names."""
    resolved = resolve(run, fleet.gpus, "cuda", elsewhere=True)
    shape, train, ops = run.model.shape, run.train, ops_of(run, resolved)
    sends = tuple(collectives(resolved, shape, fleet.gpus))
    offload = host_traffic(resolved, shape, fleet.gpus)
    reached = time = None
    if fleet.peak is not None and resolved.dtype != "fp32":
        tokens = train.micro_batch * train.sequence_length
        reached = fleet.reached or reached_share(tokens, resolved.stage, graphs_are_used(run, resolved), ops)
        per_token = hardware_flops_per_token(
            shape, train.sequence_length, train.activation_checkpointing, train.recompute, ops["cross_entropy"]
        )
        on_one_gpu = per_token * train.global_batch * train.sequence_length / fleet.gpus
        time = step_time(on_one_gpu / (fleet.peak * reached), sends, fleet.gpus, fleet.network, offload, fleet.host)
    return Estimate(run, resolved, fleet, gpu_memory(run, resolved, fleet.gpus), sends, offload, time, reached)
