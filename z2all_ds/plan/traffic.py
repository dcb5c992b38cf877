"""What each rank sends in an optimizer step under a ZeRO JSON, as DeepSpeed 0.19.8 does it, and what an offload moves.

The ZeRO paper counts in parameters Ψ: 2Ψ for stages 0 to 2 (gradients reduced to their owners, weights gathered), 3Ψ
for stage 3 (weights gathered twice). DeepSpeed differs from it in both directions, and tests compare what follows with
the calls of real ranks:

- a message has bytes, and fp32 gradients twice those of bf16;
- stages 2 and 3 send the gradients of every micro-batch;
- stages 1 and 2 reduce by all-reduce (2Ψ), not to owners (Ψ), and so send 3Ψ in all, unless the JSON has
  `"use_multi_rank_bucket_allreduce": false`;
- stage 3 gathers again in the backward pass only what it has let go of (`gathers.py`), and small weights once a step;
- a hierarchical partition (`zero_hpz_partition_size`) gathers over all ranks once a step, in the first forward pass,
  and all else inside its groups, the forward passes of further micro-batches too.

Not counted are messages of a few bytes (norms, overflow flags), and the first steps of stage 3, in which DeepSpeed
records the order of modules, fetches nothing ahead and lets go of everything. Quantized weights and gradients are not
known here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from z2all_ds.base.accounting import ModelShape
from z2all_ds.plan.gathers import Gathers, setting, weights_of
from z2all_ds.plan.memory import BYTES_PER_DTYPE
from z2all_ds.zero.ds_config import ResolvedDeepSpeed
from z2all_ds.zero.ds_json import offload_device, zero_section

ENGINE_BUCKET = 500_000_000
"""Elements that DeepSpeed's engine sends at a time where its optimizer does not send itself."""
ALIGNMENT = 2
"""Stages 1 and 2 fill a flat group of weights up to a multiple of this times the ranks."""


@dataclass(frozen=True)
class Collective:
    """The same message, several times a step."""

    what: str
    kind: str
    """all_reduce, all_gather, reduce_scatter or reduce."""
    size: int
    """Bytes of the whole, over all ranks' parts."""
    times: int
    """A step."""
    calls: int
    """Into which it is cut."""
    beside_compute: bool
    """DeepSpeed lets it run while the next part is computed."""
    among: int
    """Ranks that take part: all, or those of one group."""

    def sent(self) -> float:
        """Bytes that one rank sends in a step, by a ring or anything as good; of `reduce`, averaged over ranks."""
        rounds = 2 if self.kind == "all_reduce" else 1
        return rounds * (self.among - 1) / self.among * self.size * self.times


@dataclass(frozen=True)
class HostTraffic:
    """What an offload moves for one rank in a step, in bytes. Read in DeepSpeed's source, not measured."""

    to_host: int = 0
    to_gpu: int = 0
    stepped: int = 0
    """Of host memory, read or written by the optimizer's step on the CPU."""
    disk_read: int = 0
    disk_written: int = 0


def collectives(resolved: ResolvedDeepSpeed, shape: ModelShape, ranks: int) -> list[Collective]:
    """In the order of a step. Without a second rank there are none."""
    if ranks == 1:
        return []
    if resolved.stage == 3:
        return _of_stage_3(resolved, shape, ranks)
    gradients = _gradients_below_stage_3(resolved, shape, ranks)
    if resolved.stage == 0:
        return [gradients]
    # A call for each parameter group: matrices, and what has one dimension.
    groups = [sum(one.numel for one in weights_of(shape) if one.is_vector == vectors) for vectors in (False, True)]
    size = sum(_up(numel, ALIGNMENT * ranks) for numel in groups) * BYTES_PER_DTYPE[resolved.dtypes.compute]
    return [gradients, Collective("weights", "all_gather", size, 1, 2, beside_compute=False, among=ranks)]


def host_traffic(resolved: ResolvedDeepSpeed, shape: ModelShape, ranks: int) -> HostTraffic:
    """All zero without an offload. At stage 1, which no JSON of ours offloads, as if gradients went once a step."""
    dtypes, times = resolved.dtypes, resolved.accumulation
    optimizer, weights = (offload_device(resolved.config, key) for key in ("offload_optimizer", "offload_param"))
    if optimizer == "none" and weights == "none":
        return HostTraffic()
    share = sum(-(-weight.numel // ranks) for weight in weights_of(shape))
    compute, added_up, master = (BYTES_PER_DTYPE[name] for name in (dtypes.compute, dtypes.accumulation, dtypes.master))
    to_host = to_gpu = stepped = disk_read = disk_written = 0
    if optimizer != "none":
        # Every step: gradients as the masters are, and back the new weights.
        to_host, to_gpu = share * master, share * compute if weights == "none" else 0
        # Adam reads weight, gradient and two moments, and writes all but the gradient; before it gradients are scaled,
        # and after it weights are cast.
        stepped = share * ((4 + 3) * master + 2 * master + master + compute)
        if resolved.stage == 3:
            # Sums of gradients are kept there, and come back with every micro-batch, the first too.
            to_host, to_gpu = to_host + times * share * added_up, to_gpu + times * share * added_up
        elif resolved.stage == 2 and times > 1 and added_up == compute:
            # Only sums of another dtype are kept on the GPU.
            to_host, to_gpu = to_host + times * share * added_up, to_gpu + (times - 1) * share * added_up
    if optimizer == "nvme":  # masters, moments and gradients, each of them out and in again
        disk_read, disk_written = 4 * share * master, 4 * share * master
    if weights != "none":
        fetched = sum(one.numel // one.among * one.times for one in _fetches(resolved, shape, ranks)) * compute
        to_gpu += fetched
        if weights == "nvme":
            disk_read, disk_written = disk_read + fetched, disk_written + share * compute
    return HostTraffic(to_host, to_gpu, stepped, disk_read, disk_written)


def _gradient_bytes(resolved: ResolvedDeepSpeed) -> int:
    return BYTES_PER_DTYPE[resolved.dtypes.communication]


def _gradients_below_stage_3(resolved: ResolvedDeepSpeed, shape: ModelShape, ranks: int) -> Collective:
    zero, numels = zero_section(resolved.config), [weight.numel for weight in reversed(weights_of(shape))]
    size, times = sum(numels) * _gradient_bytes(resolved), resolved.accumulation if resolved.stage == 2 else 1
    # At stage 1 with 16-bit weights and fp32 sums DeepSpeed takes another optimizer, and the engine sends its two flat
    # groups, as without ZeRO it sends all gradients.
    other = resolved.dtypes.compute == "bf16" and resolved.dtypes.accumulation == "fp32"
    flat = resolved.stage == 1 and other and not resolved.offload_optimizer
    if flat or resolved.stage == 0:
        vectors = sum(weight.numel for weight in weights_of(shape) if weight.is_vector)
        pieces = [sum(numels) - vectors, vectors] if flat else numels
        return Collective("gradients", "all_reduce", size, 1, _engine_calls(pieces), False, ranks)
    if resolved.stage == 1:  # after the last backward pass, group by group
        numels = [weight.numel for weight in sorted(weights_of(shape), key=lambda weight: weight.is_vector)]
    calls = _buckets(numels, setting(resolved, "reduce_bucket_size"))
    to_owners = zero.get("reduce_scatter", True) and not zero.get("use_multi_rank_bucket_allreduce", True)
    kind = "reduce" if to_owners else "all_reduce"
    calls += ranks - 1 if to_owners else 0  # a bucket's part for each owner in it
    overlap = resolved.stage == 2 and bool(zero.get("overlap_comm"))
    return Collective("gradients", kind, size, times, calls, overlap, ranks)


def _engine_calls(numels: Iterable[int]) -> int:
    """Sent as soon as there is more than a bucket."""
    calls = pending = 0
    for numel in numels:
        pending += numel
        if pending > ENGINE_BUCKET:
            calls, pending = calls + 1, 0
    return calls + (pending > 0)


def _buckets(numels: Iterable[int], most: int) -> int:
    """Sent before there would be more than a bucket; what is larger than one goes alone."""
    calls = pending = 0
    for numel in numels:
        if pending and pending + numel > most:
            calls, pending = calls + 1, 0
        pending += numel
    return calls + (pending > 0)


def _of_stage_3(resolved: ResolvedDeepSpeed, shape: ModelShape, ranks: int) -> list[Collective]:
    weight_bytes = BYTES_PER_DTYPE[resolved.dtypes.compute]
    gathered = [
        Collective(one.what, "all_gather", one.numel * weight_bytes, one.times, one.calls, one.ahead, one.among)
        for one in _fetches(resolved, shape, ranks)
    ]
    zero, numels = zero_section(resolved.config), [weight.numel for weight in reversed(weights_of(shape))]
    scattered = zero.get("reduce_scatter", True)
    filled = sum(_up(numel, ranks) for numel in numels) if scattered else sum(numels)
    gradients = Collective(
        "gradients",
        "reduce_scatter" if scattered else "all_reduce",
        filled * _gradient_bytes(resolved),
        resolved.accumulation,
        _buckets(numels, setting(resolved, "reduce_bucket_size")),
        bool(zero.get("overlap_comm", True)),
        ranks,
    )
    *in_passes, after = gathered
    return [*in_passes, gradients, after]


@dataclass(frozen=True)
class _Fetch:
    """Gathers of a kind in one micro-batch: elements in all, filled up to a multiple of the ranks for each weight."""

    what: str
    numel: int
    times: int
    calls: int
    ahead: bool
    among: int


def _fetches(resolved: ResolvedDeepSpeed, shape: ModelShape, ranks: int) -> list[_Fetch]:
    """Those of the passes, and last the one after the step, of weights that are never let go of."""
    group = int(zero_section(resolved.config).get("zero_hpz_partition_size") or 1)
    # In a hierarchical partition a weight is copied to the group when it is let go of for the first time after a step.
    batches = [(True, resolved.accumulation)] if group == 1 else [(False, 1), (True, resolved.accumulation - 1)]
    gathers, fetches = Gathers(resolved, shape), []
    for copies, times in batches:
        messages = gathers.micro_batch(copies) if times else []
        for ahead, copied in sorted({(message.ahead, message.copied) for message in messages}):
            of_kind = [message.names for message in messages if (message.ahead, message.copied) == (ahead, copied)]
            numel = sum(_up(gathers.numels[name], ranks) for names in of_kind for name in names)
            what = "weights, fetched ahead" if ahead else "weights, waited for"
            among = group if copied and group > 1 else ranks
            fetches.append(_Fetch(what, numel, times, len(of_kind), ahead, among))
    kept = sum(_up(gathers.numels[name], ranks) for name in gathers.kept)
    return [*fetches, _Fetch("weights, kept whole", kept, 1, len(gathers.kept), False, ranks)]


def _up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
