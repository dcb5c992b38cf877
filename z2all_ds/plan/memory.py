"""Bytes that a run needs on one GPU under a ZeRO JSON, part by part, and on the host and the disk with an offload.

Everything follows from the run config and the resolved JSON: what DeepSpeed 0.19.8 and our ops keep. The parts add up
to the peak, which is either in the backward pass of a micro-batch, with its activations, or in the optimizer step, with
DeepSpeed's copies of gradients and the optimizer's own temporary tensors. `z2all bench memory` compares the result with
real runs.
"""

from dataclasses import dataclass, fields, replace

from z2all_ds.base.accounting import ModelShape, count_parameters
from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.stages import RunStage, run_stages
from z2all_ds.plan.activations import activations, chosen_ops
from z2all_ds.plan.traffic import BYTES_PER_DTYPE, ENGINE_BUCKET, setting
from z2all_ds.train.speed.graph_conditions import USES_SINKS, has_sinks, why_no_graphs
from z2all_ds.zero.ds_config import ResolvedDeepSpeed
from z2all_ds.zero.ds_json import offload_device, zero_section

CUDA_CONTEXT = 1_800_000_000
"""Memory of a process outside torch's tensors: 1.2 to 1.8 GB on an H200 (kernels, cuBLAS, cuDNN, NCCL of two ranks)."""
NCCL = 1_000_000_000
"""Assumed for NCCL's buffers with many ranks. Only two ranks on one GPU were measured."""
HOLES, HOLES_IN_GRAPHS, HOLES_WHERE_GATHERED = 0.03, 0.01, 0.1
"""Share of allocated memory with expandable segments. Measured: 1 to 3 %, almost none in CUDA graphs, 7 to 15 % where
stage 3 gathers weights; torch frees most of that on demand."""
HOST_PROCESS, HOST_PROCESS_AT_STAGE_3 = 2_200_000_000, 4_100_000_000
"""Resident memory without offload: torch, DeepSpeed, CUDA's libraries."""
FP32_BYTES, FP64_BYTES = 4, 8


@dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU in bytes."""

    weights: int = 0
    gradients: int = 0  # Gradients of one micro-batch in the compute dtype
    accumulation: int = 0  # Separate sums over micro-batches
    master_weights: int = 0
    moments: int = 0
    gathered: int = 0  # Stage 3: weights of other ranks that are present, prefetched or kept for the backward pass
    buckets: int = 0  # Communication buckets of gradients, and copies and temporary tensors of the step
    activations: int = 0
    logits: int = 0
    context: int = 0  # CUDA's own memory and NCCL's buffers
    fragmentation: int = 0  # Allowance for holes between tensors
    host: int = 0  # Main memory of this GPU's rank
    disk: int = 0

    @property
    def allocated(self) -> int:
        """Return the peak that torch reports as allocated."""
        return self.total - self.context - self.fragmentation

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self) if part.name not in ("host", "disk"))


def states_of_zero_paper(parameters: int, gpus: int, stage: int) -> int:
    """Return the ZeRO paper's bytes of model states per GPU: 2 for weights, 2 for gradients and 12 for Adam."""
    share = -(-parameters // gpus)
    return sum(size * (share if stage >= split else parameters) for size, split in ((2, 3), (2, 2), (12, 1)))


def gpu_memory(run: RunConfig, resolved: ResolvedDeepSpeed, ranks: int) -> GpuMemory:
    """Return the memory of the run stage that needs most."""
    return max((_of_stage(run, resolved, ranks, stage) for stage in run_stages(run)), key=lambda memory: memory.total)


def graphs_are_used(run: RunConfig, resolved: ResolvedDeepSpeed) -> bool:
    refusal = why_no_graphs("cuda", run, ops_of(run, resolved), has_sinks(resolved, run))
    return refusal is None and run.train.cuda_graphs != "never"


def ops_of(run: RunConfig, resolved: ResolvedDeepSpeed) -> dict[str, str]:
    """Return the backend of each op on a GPU."""
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
    temporary = batch.temporary(graphs)
    # Validation and probes run outside the graphs and need their own logits.
    validated = batch.logits if graphs and (run.validation.corpus or run.probes.file) else 0
    states = _states(run, resolved, ranks)
    in_backward, in_step = _buckets(run, resolved, ranks)
    # The step's copies exist after the activations are freed, so only the excess counts. Graphs keep their memory.
    reusable = 0 if graphs else in_backward + batch.kept + temporary + states.gathered
    together = replace(
        states,
        activations=batch.kept + temporary - min(temporary, batch.logits),
        logits=min(temporary, batch.logits) + validated,
        buckets=in_backward + max(0, in_step - reusable),
    )
    in_pieces = resolved.stage == 3 and (ranks > 1 or resolved.offload_optimizer)
    holes = HOLES_IN_GRAPHS if graphs else HOLES_WHERE_GATHERED if in_pieces else HOLES
    return replace(
        together,
        context=CUDA_CONTEXT + (NCCL if ranks > 1 else 0),
        fragmentation=int(holes * together.allocated),
        host=together.host + (HOST_PROCESS_AT_STAGE_3 if resolved.stage == 3 else HOST_PROCESS),
    )


def _states(run: RunConfig, resolved: ResolvedDeepSpeed, ranks: int) -> GpuMemory:
    parameters, stage = count_parameters(run.model.shape).total, resolved.stage
    share = -(-parameters // ranks)
    compute, accumulated = BYTES_PER_DTYPE[resolved.dtype], BYTES_PER_DTYPE[resolved.dtypes.accumulation]
    held = parameters if stage < 2 else share
    # In fp32 the weights are their own master, but stages 1 and 2 clone their partition anyway.
    has_master = resolved.dtype != "fp32" or stage in (1, 2)
    states = GpuMemory(
        weights=compute * (share if stage == 3 else parameters),
        gradients=compute * held if _keeps_gradients(run, resolved) else 0,
        accumulation=accumulated * held if accumulated > compute else 0,
        master_weights=BYTES_PER_DTYPE[resolved.dtypes.master] * share if has_master else 0,
        moments=int(resolved.optimizer.state_bytes_per_parameter * (share if stage else parameters)),
        gathered=_gathered(run.model.shape, resolved, ranks, compute) if stage == 3 else 0,
    )
    return _offloaded(resolved, states, parameters, share) if resolved.offload_optimizer else states


def _keeps_gradients(run: RunConfig, resolved: ResolvedDeepSpeed) -> bool:
    """Return whether gradients in the compute dtype exist when activations are largest.

    Gradients of a single micro-batch appear while activations are freed. Stage 0, and stage 1 in one dtype, add the
    next micro-batch to them; DeepSpeed's BF16 optimizer keeps them, filled with zeros, unless there are sinks.
    """
    if resolved.accumulation == 1 or resolved.stage > 1 or _all_in_sinks(run, resolved):
        return resolved.stage > 1 and resolved.dtypes.accumulation == resolved.dtype
    return resolved.dtypes.accumulation == resolved.dtype or _is_bf16_optimizer(resolved)


def _all_in_sinks(run: RunConfig, resolved: ResolvedDeepSpeed) -> bool:
    """Return whether no matrix product passes its weight gradient to autograd."""
    return has_sinks(resolved, run) and ops_of(run, resolved)["linear"] in USES_SINKS["linear"]


def _is_bf16_optimizer(resolved: ResolvedDeepSpeed) -> bool:
    return resolved.dtype == "bf16" and resolved.dtypes.accumulation == "fp32" and not resolved.offload_optimizer


def _offloaded(resolved: ResolvedDeepSpeed, states: GpuMemory, parameters: int, share: int) -> GpuMemory:
    """Move master weights, moments and their gradients to main memory or to a disk, and weights if asked."""
    compute, accumulated = BYTES_PER_DTYPE[resolved.dtype], BYTES_PER_DTYPE[resolved.dtypes.accumulation]
    pins = (zero_section(resolved.config).get("offload_optimizer") or {}).get("pin_memory")

    def pinned(size: int) -> int:
        """torch rounds pinned memory up to a power of two."""
        return 1 << (size - 1).bit_length() if size and pins else size

    optimizer, gradients = states.master_weights + states.moments, FP32_BYTES * share
    if resolved.stage == 3:
        to_disk = offload_device(resolved.config, "offload_optimizer") == "nvme"
        moves_weights = offload_device(resolved.config, "offload_param") != "none"
        sub_group = setting(resolved, "sub_group_size")
        whole, rest = divmod(share, sub_group)
        in_sub_groups = whole * pinned(FP32_BYTES * sub_group) + pinned(FP32_BYTES * rest)
        host = pinned(accumulated * share) + (0 if to_disk else optimizer + in_sub_groups)
        return GpuMemory(
            weights=0 if moves_weights else states.weights,
            gathered=states.gathered,
            host=host + (pinned(states.weights) if moves_weights else 0),
            disk=optimizer + gradients if to_disk else 0,
        )
    # Only sums of another dtype stay on the GPU; others are added up in main memory.
    several = resolved.accumulation > 1
    copies = 2 if several and accumulated <= compute else 1
    return GpuMemory(
        weights=states.weights,
        gradients=compute * parameters if resolved.stage == 1 else 0,
        accumulation=accumulated * share if several and accumulated > compute else 0,
        host=pinned(states.master_weights) + pinned(gradients) + states.moments + copies * pinned(compute * share),
    )


def _gathered(shape: ModelShape, resolved: ResolvedDeepSpeed, ranks: int, compute: int) -> int:
    """Return stage 3's weights of other ranks: stage3_max_live_parameters, or the largest module if that is more, and
    the prefetch; with a hierarchical partition also the group's copy."""
    if ranks == 1 and offload_device(resolved.config, "offload_param") == "none":
        return 0
    counts = count_parameters(shape)
    live, ahead = (setting(resolved, f"stage3_{key}") for key in ("max_live_parameters", "prefetch_bucket_size"))
    layer = (counts.attention + counts.mlp + counts.norms) // shape.num_layers
    group = int(zero_section(resolved.config).get("zero_hpz_partition_size") or 1)
    copy = compute * counts.total // group if group > 1 else 0
    return compute * min(counts.total, max(live, layer, counts.embedding) + ahead) + copy


def _buckets(run: RunConfig, resolved: ResolvedDeepSpeed, ranks: int) -> tuple[int, int]:
    """Return the bytes (in the backward pass when activations are largest, afterwards and in the step)."""
    shape, compute = run.model.shape, BYTES_PER_DTYPE[resolved.dtype]
    parameters, largest = count_parameters(shape).total, shape.vocab_size * shape.hidden_size
    share = -(-parameters // ranks)
    sent = resolved.dtypes.communication
    sent_bytes = BYTES_PER_DTYPE[sent] if sent != "none" else compute
    bucket = setting(resolved, "reduce_bucket_size")
    whole = resolved.stage < 2 and not _all_in_sinks(run, resolved) and not _keeps_gradients(run, resolved)
    gradients = compute * parameters if whole else 0
    temporary = resolved.optimizer.step_bytes_per_parameter  # per parameter of the largest tensor updated at once
    if resolved.stage == 0:
        engine = min(parameters, ENGINE_BUCKET) * sent_bytes if ranks > 1 else 0
        return 0, gradients + max(engine, FP64_BYTES * largest, int(temporary * largest))
    if resolved.stage == 1 and _is_bf16_optimizer(resolved):
        # Its gradients are flat: the engine copies them only if they fit into one bucket.
        copied = ranks > 1 and parameters <= ENGINE_BUCKET
        return 0, gradients + (parameters * sent_bytes if copied else 0) + int(temporary * share)
    if resolved.stage == 3:
        # A gradient larger than the bucket goes alone: the head's is the first.
        alone = compute * largest if largest > bucket else 0
        updated = 0 if resolved.offload_optimizer else min(share, setting(resolved, "sub_group_size"))
        return sent_bytes * bucket + alone, sent_bytes * bucket + int((FP32_BYTES + temporary) * updated)
    buckets = (2 if zero_section(resolved.config).get("overlap_comm") else 1) * compute * bucket
    if resolved.offload_optimizer:  # and space for the largest gradient
        return buckets + compute * largest, gradients + buckets + compute * largest
    # The optimizer itself steps when buckets and sums are freed and only the fp32 gradient is left.
    stepping = int((FP32_BYTES + temporary - BYTES_PER_DTYPE[resolved.dtypes.accumulation]) * share)
    return buckets, gradients + max(buckets + FP32_BYTES * share, stepping)
