"""Bytes that each rank sends per optimizer step under a ZeRO JSON with DeepSpeed 0.19.8, and bytes an offload moves.

The ZeRO paper counts in parameters Ψ: 2Ψ for stages 0 to 2 (reduce gradients to their owners, gather weights), 3Ψ for
stage 3 (gather weights twice). DeepSpeed differs as follows; tests compare the counts with the calls of real ranks:

- fp32 gradients have twice the bytes of bf16 gradients;
- stages 2 and 3 send the gradients of every micro-batch;
- stages 1 and 2 all-reduce gradients (2Ψ) instead of reducing them to owners (Ψ), 3Ψ in all, unless the JSON has
  `"use_multi_rank_bucket_allreduce": false`;
- stage 3 gathers again in the backward pass only what it has released, and small weights once per step;
- a hierarchical partition (`zero_hpz_partition_size`) gathers over all ranks in the first forward pass of a step, and
  inside its groups otherwise.

Not counted: messages of a few bytes (norms, overflow flags), quantized weights and gradients, and the first two
micro-batches of stage 3, in which DeepSpeed records the order of modules.
"""

import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from z2all_ds.base.accounting import ModelShape, count_parameters
from z2all_ds.zero.ds_config import ResolvedDeepSpeed
from z2all_ds.zero.ds_json import offload_device, zero_section

BYTES_PER_DTYPE = {"bf16": 2, "fp16": 2, "fp32": 4}
DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_model_persistence_threshold": sys.maxsize,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}
"""DeepSpeed's values of `zero_optimization` keys that a JSON leaves out."""
ENGINE_BUCKET = 500_000_000
"""Elements per call where DeepSpeed's engine, not its optimizer, reduces gradients."""
ALIGNMENT = 2
"""Stages 1 and 2 pad each flat group of weights to a multiple of this times the number of ranks."""


class Weight(NamedTuple):
    """One parameter tensor of the model."""

    name: str
    numel: int
    is_vector: bool = False


@dataclass(frozen=True)
class Collective:
    """The same message, sent `times` per step."""

    what: str
    kind: str  # all_reduce, all_gather, reduce_scatter or reduce
    size: int  # Bytes of the whole message, over all ranks
    times: int  # Per step
    calls: int  # Calls that one message is split into
    beside_compute: bool  # DeepSpeed overlaps it with compute
    among: int  # Ranks that take part: all, or those of one group

    def sent(self) -> float:
        """Return the bytes that one rank sends per step with a ring; the mean over ranks for `reduce`."""
        rounds = 2 if self.kind == "all_reduce" else 1
        return rounds * (self.among - 1) / self.among * self.size * self.times


@dataclass(frozen=True)
class HostTraffic:
    """Bytes that an offload moves for one rank per step. Derived from DeepSpeed's source, not measured."""

    to_host: int = 0
    to_gpu: int = 0
    stepped: int = 0  # Bytes of host memory that the optimizer step on the CPU reads and writes
    disk_read: int = 0
    disk_written: int = 0


def setting(resolved: ResolvedDeepSpeed, key: str) -> int:
    """Return a value of `zero_optimization`, with DeepSpeed's default."""
    value = zero_section(resolved.config).get(key)
    return int(DEFAULTS[key] if value is None else value)


def collectives(resolved: ResolvedDeepSpeed, shape: ModelShape, ranks: int) -> list[Collective]:
    """Return the collectives of one step in order; none for a single rank."""
    if ranks == 1:
        return []
    if resolved.stage == 3:
        *in_passes, after_step = _gathers(resolved, shape, ranks)
        return [*in_passes, _gradients_at_stage_3(resolved, shape, ranks), after_step]
    gradients = _gradients_below_stage_3(resolved, shape, ranks)
    if resolved.stage == 0:
        return [gradients]
    # One call per parameter group: matrices and vectors.
    groups = [sum(one.numel for one in _weights(shape) if one.is_vector == vectors) for vectors in (False, True)]
    size = sum(_up(numel, ALIGNMENT * ranks) for numel in groups) * BYTES_PER_DTYPE[resolved.dtypes.compute]
    return [gradients, Collective("weights", "all_gather", size, 1, 2, beside_compute=False, among=ranks)]


def host_traffic(resolved: ResolvedDeepSpeed, shape: ModelShape, ranks: int) -> HostTraffic:
    """Return what an offload moves. At stage 1, which no shipped JSON offloads, gradients count once per step."""
    dtypes, times = resolved.dtypes, resolved.accumulation
    optimizer, weights = (offload_device(resolved.config, key) for key in ("offload_optimizer", "offload_param"))
    share = sum(-(-weight.numel // ranks) for weight in _weights(shape))
    compute, sums, master = (BYTES_PER_DTYPE[name] for name in (dtypes.compute, dtypes.accumulation, dtypes.master))
    to_host = to_gpu = stepped = disk_read = disk_written = 0
    if optimizer != "none":
        # Per step: gradients in the master dtype to the host, new weights back.
        to_host, to_gpu = share * master, share * compute if weights == "none" else 0
        # Adam reads weight, gradient and two moments and writes all but the gradient. Gradients are scaled before it,
        # weights are cast after it.
        stepped = share * ((4 + 3) * master + 2 * master + master + compute)
        if resolved.stage == 3:
            # Sums of gradients are in host memory and return with every micro-batch, also with the first.
            to_host, to_gpu = to_host + times * share * sums, to_gpu + times * share * sums
        elif resolved.stage == 2 and times > 1 and sums == compute:
            # Only sums of another dtype stay on the GPU.
            to_host, to_gpu = to_host + times * share * sums, to_gpu + (times - 1) * share * sums
    if optimizer == "nvme":  # masters, moments and gradients, each written and read
        disk_read = disk_written = 4 * share * master
    if weights != "none":
        fetched = sum(one.size // one.among * one.times for one in _gathers(resolved, shape, ranks))
        to_gpu += fetched
        if weights == "nvme":
            disk_read, disk_written = disk_read + fetched, disk_written + share * compute
    return HostTraffic(to_host, to_gpu, stepped, disk_read, disk_written)


def _gradients_below_stage_3(resolved: ResolvedDeepSpeed, shape: ModelShape, ranks: int) -> Collective:
    zero, weights = zero_section(resolved.config), _weights(shape)
    numels = [weight.numel for weight in reversed(weights)]
    size = sum(numels) * BYTES_PER_DTYPE[resolved.dtypes.communication]
    # At stage 1 with bf16 weights and fp32 sums DeepSpeed uses its BF16 optimizer. The engine then reduces the two flat
    # groups of that optimizer, as it reduces all gradients at stage 0.
    bf16_optimizer = resolved.dtypes.compute == "bf16" and resolved.dtypes.accumulation == "fp32"
    flat = resolved.stage == 1 and bf16_optimizer and not resolved.offload_optimizer
    if flat or resolved.stage == 0:
        vectors = sum(weight.numel for weight in weights if weight.is_vector)
        calls = _calls([sum(numels) - vectors, vectors] if flat else numels, ENGINE_BUCKET, may_overflow=True)
        return Collective("gradients", "all_reduce", size, 1, calls, False, ranks)
    if resolved.stage == 1:  # after the last backward pass, one group after the other
        numels = [weight.numel for weight in sorted(weights, key=lambda weight: weight.is_vector)]
    to_owners = zero.get("reduce_scatter", True) and not zero.get("use_multi_rank_bucket_allreduce", True)
    # To owners, each bucket is split at the borders between owners.
    calls = _calls(numels, setting(resolved, "reduce_bucket_size")) + (ranks - 1 if to_owners else 0)
    times, overlap = (resolved.accumulation, bool(zero.get("overlap_comm"))) if resolved.stage == 2 else (1, False)
    return Collective("gradients", "reduce" if to_owners else "all_reduce", size, times, calls, overlap, ranks)


def _gradients_at_stage_3(resolved: ResolvedDeepSpeed, shape: ModelShape, ranks: int) -> Collective:
    zero, numels = zero_section(resolved.config), [weight.numel for weight in reversed(_weights(shape))]
    scatter = zero.get("reduce_scatter", True)
    padded = sum(_up(numel, ranks if scatter else 1) for numel in numels)
    return Collective(
        what="gradients",
        kind="reduce_scatter" if scatter else "all_reduce",
        size=padded * BYTES_PER_DTYPE[resolved.dtypes.communication],
        times=resolved.accumulation,
        calls=_calls(numels, setting(resolved, "reduce_bucket_size")),
        beside_compute=bool(zero.get("overlap_comm", True)),
        among=ranks,
    )


def _calls(numels: Iterable[int], bucket: int, may_overflow: bool = False) -> int:
    """Count the calls that send gradients in buckets. The engine's buckets may overflow; the optimizer sends a bucket
    before it would overflow, and a larger gradient alone."""
    calls = pending = 0
    for numel in numels:
        if not may_overflow and pending and pending + numel > bucket:
            calls, pending = calls + 1, 0
        pending += numel
        if may_overflow and pending > bucket:
            calls, pending = calls + 1, 0
    return calls + (pending > 0)


def _gathers(resolved: ResolvedDeepSpeed, shape: ModelShape, ranks: int) -> list[Collective]:
    """Return stage 3's gathers of weights: those in the passes, and last the one of persistent weights after a step."""
    group = int(zero_section(resolved.config).get("zero_hpz_partition_size") or 1)
    # In a hierarchical partition the group gets its copy of a weight when the weight is first released after a step.
    batches = [(True, resolved.accumulation)] if group == 1 else [(False, 1), (True, resolved.accumulation - 1)]
    numels = {weight.name: weight.numel for weight in _weights(shape)}
    persistent = _persistent(resolved, numels)

    def gather(what: str, calls: list[list[str]], times: int, ahead: bool, among: int) -> Collective:
        padded = sum(_up(numels[name], ranks) for names in calls for name in names)
        size = padded * BYTES_PER_DTYPE[resolved.dtypes.compute]
        return Collective(what, "all_gather", size, times, len(calls), ahead, among)

    found = []
    for in_group, times in batches:
        fetches = _fetches(resolved, shape, numels, persistent, in_group) if times else []
        for ahead, copied in sorted({(one.ahead, one.copied) for one in fetches}):
            calls = [one.names for one in fetches if (one.ahead, one.copied) == (ahead, copied)]
            what = "weights, fetched ahead" if ahead else "weights, waited for"
            found.append(gather(what, calls, times, ahead, group if copied and group > 1 else ranks))
    return [*found, gather("weights, kept whole", [[name] for name in persistent], 1, False, ranks)]


class _Fetch(NamedTuple):
    """Weights that DeepSpeed gathers in one call."""

    names: list[str]
    ahead: bool
    copied: bool  # From the group's copy


class _Visit(NamedTuple):
    """A module in the order in which DeepSpeed's hooks see it."""

    own: tuple[str, ...]  # Weights that it fetches; a layer fetches all weights inside it
    inside: tuple[str, ...]
    is_layer: bool = False


def _fetches(
    resolved: ResolvedDeepSpeed, shape: ModelShape, numels: dict[str, int], persistent: set[str], in_group: bool
) -> list[_Fetch]:
    """Replay stage 3's coordinator over one micro-batch. `in_group`: the group has copies of all weights.

    A module releases its weights after its pass unless they are persistent or used again within
    `stage3_max_reuse_distance` elements. From a layer that search meets the whole model, with all weights, at the start
    of the backward pass: weights less than the distance from the end of the forward pass stay. Weights whose next use
    the prefetch has already passed stay too. A closed form of these rules gives the bytes under the shipped JSONs, but
    not with short distances (30 % off in a tested case), and not the number of calls.
    """
    bucket, most_live, distance = (
        setting(resolved, f"stage3_{key}")
        for key in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")
    )
    visits = _visits(shape)
    queue = deque((name, step) for step, visit in enumerate(visits) for name in visit.own)
    here, copied, live = set(persistent), set(numels if in_group else ()), 0
    looked_ahead = dict.fromkeys(numels, -1)
    fetches: list[_Fetch] = []

    def fetch(names: Iterable[str], ahead: bool) -> int:
        missing = [name for name in names if name not in here]
        for of_group in (True, False):
            if together := [name for name in missing if (name in copied) == of_group]:
                fetches.append(_Fetch(together, ahead, of_group))
        here.update(missing)
        return sum(numels[name] for name in missing)

    for step, visit in enumerate(visits):
        live += fetch(visit.own, ahead=False)
        wanted: dict[str, None] = {}
        room, numel = min(most_live - live, bucket), 0
        while queue and (queue[0][1] <= step or numel < room):
            name, used_at = queue.popleft()
            looked_ahead[name] = used_at
            if name not in here and name not in wanted:
                wanted[name] = None
                numel += numels[name]
        live += fetch(wanted, ahead=True)
        if visits[step + 1 : step + 2] == [visit]:  # a layer's first visit of two in the backward pass
            continue
        released = {name for name in visit.own if name not in persistent and looked_ahead[name] <= step + 1}
        walked = 0
        for later in visits[step + 1 :]:
            if walked >= distance or not released:
                break
            # DeepSpeed looks inside the modules it meets if the module it releases is a layer.
            met = later.inside if visit.is_layer else () if later.is_layer else later.own
            released.difference_update(met)
            walked += sum(numels[name] for name in met)
        here -= released
        copied |= released
        live -= sum(numels[name] for name in released)
    return fetches


def _visits(shape: ModelShape) -> list[_Visit]:
    """Return the modules of one micro-batch. A layer has two outputs, so the backward pass visits it twice."""
    names = tuple(weight.name for weight in _weights(shape))
    whole, model = _Visit((), names), _Visit((), tuple(name for name in names if name != "head"))
    layers = []
    for index in range(shape.num_layers):
        own = tuple(weight.name for weight in _layer(shape, index))
        layers.append(_Visit(own, own, is_layer=True))
    last = "embedding" if shape.tie_embeddings else "head"
    embedding, norm, head = (_Visit((name,), (name,)) for name in ("embedding", "norm", last))
    backward = [layer for layer in reversed(layers) for _ in range(2)]
    return [whole, model, embedding, *layers, norm, head, whole, head, model, norm, *backward, embedding]


def _persistent(resolved: ResolvedDeepSpeed, numels: dict[str, int]) -> set[str]:
    """Return the small weights that stage 3 never releases."""
    each, room = (setting(resolved, f"stage3_{of}_persistence_threshold") for of in ("param", "model"))
    found = set()
    for name, numel in numels.items():
        if numel <= min(each, room):
            found.add(name)
            room -= numel
    return found


def _layer(shape: ModelShape, index: int) -> list[Weight]:
    d, attention, f = shape.hidden_size, shape.attention_width, shape.intermediate_size
    rows = attention + 2 * shape.num_kv_heads * shape.head_dim
    biases = [Weight(f"{index}.qkv_bias", rows, True)], [Weight(f"{index}.o_bias", d, True)]
    qkv_bias, o_bias = biases if shape.attention_bias else ([], [])
    return [
        *(Weight(f"{index}.input_norm", d, True), Weight(f"{index}.qkv", d * rows), *qkv_bias),
        *(Weight(f"{index}.o", attention * d), *o_bias, Weight(f"{index}.mlp_norm", d, True)),
        *(Weight(f"{index}.gate_up", 2 * d * f), Weight(f"{index}.down", d * f)),
    ]


def _weights(shape: ModelShape) -> list[Weight]:
    """Return all weights in the order of use; a tied embedding comes once."""
    table = shape.vocab_size * shape.hidden_size
    layers = [weight for index in range(shape.num_layers) for weight in _layer(shape, index)]
    head = [] if shape.tie_embeddings else [Weight("head", table)]
    weights = [Weight("embedding", table), *layers, Weight("norm", shape.hidden_size, True), *head]
    assert sum(weight.numel for weight in weights) == count_parameters(shape).total
    return weights


def _up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
