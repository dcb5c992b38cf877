"""Bytes that a run takes of one GPU under a ZeRO JSON, part by part; and of the host and the disk, with offload.

Everything is read off the run config and the resolved JSON: what DeepSpeed 0.19.8 and our ops keep under them. The
parts add up to the peak. There are two moments at which it can be: while a micro-batch is run backward, with its
activations, or in the optimizer's step, with DeepSpeed's copies of gradients. `z2all bench memory` holds it against
runs.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from z2all_ds.base.accounting import ModelShape, count_parameters
from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.stages import RunStage, run_stages
from z2all_ds.plan.activations import activations, chosen_ops
from z2all_ds.plan.gathers import setting
from z2all_ds.plan.memory import BYTES_PER_DTYPE, FP32_BYTES
from z2all_ds.plan.traffic import ENGINE_BUCKET
from z2all_ds.train.speed.graph_conditions import USES_SINKS, has_sinks, why_no_graphs
from z2all_ds.zero.ds_config import ResolvedDeepSpeed
from z2all_ds.zero.ds_json import offload_device, zero_section

CUDA_CONTEXT = 1_800_000_000
"""What a process takes beside torch's tensors: 1.2 to 1.8 GB on an H200 (kernels, cuBLAS, cuDNN; two ranks' NCCL)."""
NCCL = 1_000_000_000
"""For its buffers with more ranks than two on one GPU, which is all that we could measure."""
HOLES, HOLES_IN_GRAPHS, HOLES_WHERE_GATHERED = 0.03, 0.01, 0.1
"""Of what is allocated, with segments that grow: 1 to 3 % seen, next to none in CUDA graphs, 7 to 15 % where stage 3
gathers weights. Most of that torch gives back when it must."""
HOST_PROCESS, HOST_PROCESS_AT_STAGE_3 = 2_200_000_000, 4_100_000_000
"""Resident without any offload: torch, DeepSpeed, CUDA's libraries."""
FP64_BYTES = 8


@dataclass(frozen=True)
class GpuMemory:
    """Of one GPU, in bytes."""

    weights: int = 0
    gradients: int = 0
    """Of one micro-batch, in the compute dtype."""
    accumulation: int = 0
    """Sums over micro-batches, where these are kept apart."""
    master_weights: int = 0
    moments: int = 0
    gathered: int = 0
    """Stage 3: weights of other ranks that are here for the moment, fetched ahead or kept for the backward pass."""
    buckets: int = 0
    """Of gradients on their way, and DeepSpeed's copies in the step."""
    activations: int = 0
    logits: int = 0
    context: int = 0
    """CUDA's own, and NCCL's buffers."""
    fragmentation: int = 0
    """Allowance for holes."""
    host: int = 0
    """Of main memory, by the rank of this GPU."""
    disk: int = 0

    @property
    def allocated(self) -> int:
        """Peak of what torch counts as allocated."""
        return self.total - self.context - self.fragmentation

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self) if part.name not in ("host", "disk"))


def gpu_memory(run: RunConfig, resolved: ResolvedDeepSpeed, ranks: int) -> GpuMemory:
    """Of the stage of the run that needs most."""
    return max((_of_stage(run, resolved, ranks, stage) for stage in run_stages(run)), key=lambda memory: memory.total)


def graphs_are_used(run: RunConfig, resolved: ResolvedDeepSpeed) -> bool:
    refusal = why_no_graphs("cuda", run, ops_of(run, resolved), has_sinks(resolved, run))
    return refusal is None and run.train.cuda_graphs != "never"


def ops_of(run: RunConfig, resolved: ResolvedDeepSpeed) -> dict[str, str]:
    return chosen_ops(run.ops.model_dump(), resolved.dtype, run.train.compile == "layers")


def _of_stage(run: RunConfig, resolved: ResolvedDeepSpeed, ranks: int, stage: RunStage) -> GpuMemory:
    compute = BYTES_PER_DTYPE[resolved.dtype]
    batch = activations(
        run.model.shape,
        stage.micro_batch * stage.sequence_length,
        stage.sequence_length,
        ops_of(run, resolved),
        compute_bytes=compute,
        stream_bytes=FP32_BYTES if run.model.residual_in_fp32 else compute,
        checkpointing=run.train.activation_checkpointing,
        recompute=run.train.recompute,
    )
    graphs = graphs_are_used(run, resolved)
    beside = batch.beside(graphs)
    # What validation and probes make comes beside the memory of graphs.
    validated = batch.logits if graphs and (run.validation.corpus or run.probes.file) else 0
    states = _states(run, resolved, ranks)
    sending, stepping = _buckets(run, resolved, ranks)
    # The step's copies come when activations are gone: they count only where they are more. Graphs keep theirs.
    backward = 0 if graphs else sending + batch.kept + beside + states.gathered
    together = replace(
        states,
        activations=batch.kept + beside - min(beside, batch.logits),
        logits=min(beside, batch.logits) + validated,
        buckets=sending + max(0, stepping - backward),
    )
    holes = HOLES_IN_GRAPHS if graphs else HOLES_WHERE_GATHERED if _gathers(resolved, ranks) else HOLES
    context = CUDA_CONTEXT + (NCCL if ranks > 1 else 0)
    process = HOST_PROCESS_AT_STAGE_3 if resolved.stage == 3 else HOST_PROCESS
    return replace(
        together, context=context, fragmentation=int(holes * together.allocated), host=together.host + process
    )


def _gathers(resolved: ResolvedDeepSpeed, ranks: int) -> bool:
    """Weights, or in an offload their gradients, come and go in pieces."""
    return resolved.stage == 3 and (ranks > 1 or resolved.offload_optimizer)


def _states(run: RunConfig, resolved: ResolvedDeepSpeed, ranks: int) -> GpuMemory:
    parameters = count_parameters(run.model.shape).total
    share = -(-parameters // ranks)
    stage = resolved.stage
    compute, accumulated = BYTES_PER_DTYPE[resolved.dtype], BYTES_PER_DTYPE[resolved.dtypes.accumulation]
    apart = accumulated > compute
    held = parameters if stage < 2 else share
    master_bytes = BYTES_PER_DTYPE[resolved.dtypes.master]
    # In fp32 the weights are their own master; only stages 1 and 2 clone their partition all the same.
    master = master_bytes * share if resolved.dtype != "fp32" or stage in (1, 2) else 0
    moments = int(resolved.optimizer.state_bytes_per_parameter * (share if stage else parameters))
    weights = compute * (share if stage == 3 else parameters)
    if resolved.offload_optimizer:
        return _offloaded(run, resolved, ranks, weights, master, moments)
    return GpuMemory(
        weights=weights,
        gradients=compute * held if _keeps_gradients(run, resolved) else 0,
        accumulation=accumulated * held if apart else 0,
        master_weights=master,
        moments=moments,
        gathered=_gathered(run.model.shape, resolved, ranks, compute) if stage == 3 else 0,
    )


def _keeps_gradients(run: RunConfig, resolved: ResolvedDeepSpeed) -> bool:
    """Whether 16-bit gradients (or fp32 ones in fp32) are there when activations are most.

    Those of a single micro-batch are made as activations go. Stage 0, and stage 1 in one dtype, add the next
    micro-batch's to them; DeepSpeed's BF16 optimizer keeps them, filled with zeros, unless there are sinks.
    """
    if resolved.accumulation == 1 or resolved.stage > 1 or _all_in_sinks(run, resolved):
        return resolved.stage > 1 and resolved.dtypes.accumulation == resolved.dtype
    return resolved.dtypes.accumulation == resolved.dtype or _is_bf16_optimizer(resolved)


def _all_in_sinks(run: RunConfig, resolved: ResolvedDeepSpeed) -> bool:
    """No product hands its weight's gradient to autograd."""
    return has_sinks(resolved, run) and ops_of(run, resolved)["linear"] in USES_SINKS["linear"]


def _offloaded(
    run: RunConfig, resolved: ResolvedDeepSpeed, ranks: int, weights: int, master: int, moments: int
) -> GpuMemory:
    """Master weights, moments and their gradients are in main memory, or on a disk; so may weights be."""
    zero, shape = zero_section(resolved.config), run.model.shape
    share = -(-count_parameters(shape).total // ranks)
    compute, accumulated = BYTES_PER_DTYPE[resolved.dtype], BYTES_PER_DTYPE[resolved.dtypes.accumulation]
    to_disk = offload_device(resolved.config, "offload_optimizer") == "nvme"
    weights_away = offload_device(resolved.config, "offload_param") != "none"
    pinned = _pinned if (zero.get("offload_optimizer") or {}).get("pin_memory") else int
    stepped = FP32_BYTES * share
    if resolved.stage == 3:
        sub_group = setting(resolved, "sub_group_size")
        whole, rest = divmod(share, sub_group)
        gradients = whole * pinned(FP32_BYTES * sub_group) + pinned(FP32_BYTES * rest)
        host = pinned(accumulated * share) + (0 if to_disk else master + moments + gradients)
        return GpuMemory(
            weights=0 if weights_away else weights,
            gathered=_gathered(shape, resolved, ranks, compute),
            host=host + (pinned(weights) if weights_away else 0),
            disk=master + moments + stepped if to_disk else 0,
        )
    # Only sums of another dtype stay on the GPU; others are added up in main memory.
    apart = resolved.accumulation > 1 and accumulated > compute
    sums_there = resolved.accumulation > 1 and not apart
    return GpuMemory(
        weights=weights,
        gradients=compute * count_parameters(shape).total if resolved.stage == 1 else 0,
        accumulation=accumulated * share if apart else 0,
        host=pinned(master) + pinned(stepped) + moments + pinned(compute * share) * (2 if sums_there else 1),
    )


def _pinned(size: int) -> int:
    """torch takes the next power of two of pinned memory."""
    return 1 << (size - 1).bit_length() if size else 0


def _gathered(shape: ModelShape, resolved: ResolvedDeepSpeed, ranks: int, compute: int) -> int:
    """What stage3_max_live_parameters allows, or the largest piece if that is more, and what is fetched ahead; of a
    hierarchical partition the group's copy, too."""
    zero = zero_section(resolved.config)
    weights_away = offload_device(resolved.config, "offload_param") != "none"
    if ranks == 1 and not weights_away:  # a rank alone has all weights; nothing is copied
        return 0
    counts = count_parameters(shape)
    live, ahead = (setting(resolved, f"stage3_{key}") for key in ("max_live_parameters", "prefetch_bucket_size"))
    layer = (counts.attention + counts.mlp + counts.norms) // shape.num_layers
    least = max(layer, counts.embedding)
    second_copy = int(zero.get("zero_hpz_partition_size") or 1)
    kept = compute * counts.total // second_copy if second_copy > 1 else 0
    return compute * min(counts.total, max(live, least) + ahead) + kept


def _buckets(run: RunConfig, resolved: ResolvedDeepSpeed, ranks: int) -> tuple[int, int]:
    """(while gradients are made and activations are most, afterwards and in the step)."""
    zero: dict[str, Any] = zero_section(resolved.config)
    shape = run.model.shape
    parameters, largest = count_parameters(shape).total, shape.vocab_size * shape.hidden_size
    share, compute = -(-parameters // ranks), BYTES_PER_DTYPE[resolved.dtype]
    sent = resolved.dtypes.communication
    sent_bytes = BYTES_PER_DTYPE[sent] if sent != "none" else compute
    bucket = setting(resolved, "reduce_bucket_size")
    whole = resolved.stage < 2 and not _all_in_sinks(run, resolved) and not _keeps_gradients(run, resolved)
    gradients = compute * parameters if whole else 0
    if resolved.stage == 0:
        engine = min(parameters, ENGINE_BUCKET) * sent_bytes if ranks > 1 else 0
        return 0, gradients + max(engine, FP64_BYTES * largest)
    if resolved.stage == 1 and _is_bf16_optimizer(resolved):
        # Its gradients are flat: what is larger than a bucket is sent from where it lies.
        copied = ranks > 1 and parameters <= ENGINE_BUCKET
        return 0, gradients + (parameters * sent_bytes if copied else 0)
    if resolved.stage == 3:
        sub_group = setting(resolved, "sub_group_size")
        # A gradient larger than the bucket goes by itself: the head's is the first that there is.
        alone = compute * largest if largest > bucket else 0
        copies = 0 if resolved.offload_optimizer else FP32_BYTES * min(share, sub_group)
        return sent_bytes * bucket + alone, sent_bytes * bucket + copies
    buckets = (2 if zero.get("overlap_comm") else 1) * compute * bucket
    if resolved.offload_optimizer:  # and room for the largest gradient on its way
        return buckets + compute * largest, gradients + buckets + compute * largest
    return buckets, gradients + buckets + FP32_BYTES * share


def _is_bf16_optimizer(resolved: ResolvedDeepSpeed) -> bool:
    return resolved.dtype == "bf16" and resolved.dtypes.accumulation == "fp32" and not resolved.offload_optimizer
