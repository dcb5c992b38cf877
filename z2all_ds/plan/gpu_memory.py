"""Bytes that a run takes of one GPU under a ZeRO JSON, part by part; and of the host and the disk, with offload.

Everything is read off the run config and the resolved JSON: what DeepSpeed 0.19.8 and our ops keep under them. The
parts add up to the peak. There are two moments at which it can be: while a micro-batch is run backward, with its
activations, or in the optimizer's step, with DeepSpeed's copies of gradients. `z2all bench memory` holds it against
runs.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from z2all_ds.accounting import ModelShape, count_parameters
from z2all_ds.config import RunConfig
from z2all_ds.plan.activations import Activations, activations, chosen_ops
from z2all_ds.plan.memory import BYTES_PER_DTYPE, FP32_BYTES
from z2all_ds.plan.traffic import ENGINE_BUCKET
from z2all_ds.run_stages import RunStage, run_stages
from z2all_ds.train.ds_config import ResolvedDeepSpeed
from z2all_ds.train.ds_json import offload_device, zero_section
from z2all_ds.train.graph_conditions import has_sinks, why_no_graphs

CUDA_CONTEXT = 600_000_000
"""Of a process before its first tensor, with the kernels that torch loads."""
NCCL = 1_000_000_000
"""Its buffers, where there is more than one rank."""
FRAGMENTATION = 0.03
"""Of what is allocated: holes between tensors, with segments that grow."""
DEFAULT_SUB_GROUP = 1_000_000_000
DEFAULT_LIVE = 1_000_000_000


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
    """Of main memory, for the rank of this GPU; the process itself is not counted."""
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
    refusal = why_no_graphs("cuda", run, chosen_ops(run.ops.model_dump()), has_sinks(resolved, run))
    return refusal is None and run.train.cuda_graphs != "never"


def _of_stage(run: RunConfig, resolved: ResolvedDeepSpeed, ranks: int, stage: RunStage) -> GpuMemory:
    states = _states(run, resolved, ranks)
    sending, stepping = _buckets(run, resolved, ranks)
    ops = chosen_ops(run.ops.model_dump())
    graphs = graphs_are_used(run, resolved)
    compute = BYTES_PER_DTYPE[resolved.dtype]
    batch = activations(
        run.model.shape,
        stage.micro_batch * stage.sequence_length,
        stage.sequence_length,
        ops,
        compute_bytes=compute,
        stream_bytes=FP32_BYTES if run.model.residual_in_fp32 else compute,
        checkpointing=run.train.activation_checkpointing,
        recompute=run.train.recompute,
    )
    whole, head = _laid_out(batch, graphs, run.data.document_mask)
    # The step's copies come when activations are gone: they count only where they are more.
    backward = sending + whole + head + states.gathered
    more_in_step = max(0, stepping - backward)
    together = replace(states, activations=whole, logits=head, buckets=sending + more_in_step)
    context = CUDA_CONTEXT + (NCCL if ranks > 1 else 0)
    return replace(together, context=context, fragmentation=int(FRAGMENTATION * together.allocated))


def _laid_out(batch: Activations, graphs: bool, documents: bool) -> tuple[int, int]:
    """(activations, logits) so that their sum is what they take together."""
    if graphs:
        # Packed documents come in several shapes, and the second capture did not find the first one's logits free.
        return batch.kept + batch.passing, batch.logits * (2 if documents else 1)
    return batch.kept + max(0, batch.passing - batch.logits), batch.logits


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
    needs_gradients = stage < 2 and not has_sinks(resolved, run)
    return GpuMemory(
        weights=weights,
        gradients=compute * parameters if needs_gradients else 0 if apart else compute * held,
        accumulation=accumulated * held if apart else 0,
        master_weights=master,
        moments=moments,
        gathered=_gathered(run.model.shape, resolved, ranks, compute) if stage == 3 else 0,
    )


def _offloaded(
    run: RunConfig, resolved: ResolvedDeepSpeed, ranks: int, weights: int, master: int, moments: int
) -> GpuMemory:
    """Master weights, moments and their gradients are in main memory, or on a disk; so may weights be."""
    parameters = count_parameters(run.model.shape).total
    share, compute = -(-parameters // ranks), BYTES_PER_DTYPE[resolved.dtype]
    to_disk = offload_device(resolved.config, "offload_optimizer") == "nvme"
    weights_away = offload_device(resolved.config, "offload_param") != "none"
    sums = BYTES_PER_DTYPE[resolved.dtypes.accumulation] * share if resolved.stage == 3 else compute * share
    stepped = FP32_BYTES * share
    states = master + moments
    host = sums + (0 if to_disk else states + stepped) + (weights if weights_away else 0)
    return GpuMemory(
        weights=0 if weights_away else weights,
        gradients=compute * parameters if resolved.stage == 1 else 0,
        gathered=_gathered(run.model.shape, resolved, ranks, compute) if resolved.stage == 3 else 0,
        host=host,
        disk=states + stepped if to_disk else 0,
    )


def _gathered(shape: ModelShape, resolved: ResolvedDeepSpeed, ranks: int, compute: int) -> int:
    """At most what stage3_max_live_parameters allows, or two layers if that is more, and what is fetched ahead."""
    zero = zero_section(resolved.config)
    weights_away = offload_device(resolved.config, "offload_param") != "none"
    if ranks == 1 and not weights_away:  # a rank alone has all weights; nothing is copied
        return 0
    counts = count_parameters(shape)
    live = int(zero.get("stage3_max_live_parameters") or DEFAULT_LIVE)
    ahead = int(zero.get("stage3_prefetch_bucket_size") or 0)
    layer = (counts.attention + counts.mlp + counts.norms) // shape.num_layers
    least = max(layer, counts.embedding)
    second_copy = int(zero.get("zero_hpz_partition_size") or 1)
    kept = compute * counts.total // second_copy if second_copy > 1 else 0
    return compute * min(counts.total, max(live, least) + ahead) + kept


def _buckets(run: RunConfig, resolved: ResolvedDeepSpeed, ranks: int) -> tuple[int, int]:
    """(while gradients are made, in the step)."""
    zero: dict[str, Any] = zero_section(resolved.config)
    shape = run.model.shape
    parameters, largest = count_parameters(shape).total, shape.vocab_size * shape.hidden_size
    share = -(-parameters // ranks)
    compute = BYTES_PER_DTYPE[resolved.dtype]
    sent = resolved.dtypes.communication
    sent_bytes = BYTES_PER_DTYPE[sent] if sent != "none" else compute
    bucket = int(zero.get("reduce_bucket_size") or ENGINE_BUCKET)
    if resolved.stage == 0 or has_sinks(resolved, run) or (resolved.stage == 1 and _is_bf16_optimizer(resolved)):
        engine = min(parameters, ENGINE_BUCKET) * sent_bytes if ranks > 1 else 0
        norms = 8 * largest if resolved.stage == 0 else 0
        return 0, max(engine, norms)
    buckets = 2 if zero.get("overlap_comm") and resolved.stage < 3 else 1
    if resolved.stage == 3:
        sub_group = int(zero.get("sub_group_size") or DEFAULT_SUB_GROUP)
        # The bucket, and a copy in the order in which ranks get their parts.
        return 2 * sent_bytes * bucket, FP32_BYTES * min(share, sub_group)
    copy = sent_bytes * bucket if ranks > 1 and sent_bytes != compute else 0
    offloaded = resolved.offload_optimizer
    return buckets * compute * bucket + copy, 0 if offloaded else FP32_BYTES * share


def _is_bf16_optimizer(resolved: ResolvedDeepSpeed) -> bool:
    return resolved.dtype == "bf16" and resolved.dtypes.accumulation == "fp32" and not resolved.offload_optimizer
