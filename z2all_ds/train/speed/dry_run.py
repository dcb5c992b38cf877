"""Checks before the first step that it and the largest micro-batch of every stage fit on the GPU, and reports the rest.

A stage with longer samples may start days later and would then run out of memory. A forward pass on random tokens shows
the memory of activations; it changes no gradient, random state or data. Memory that is first allocated in the first
step is added: optimizer states and, at some ZeRO stages, gradients. The step itself needs no activations, but copies of
gradients and, with some optimizers, tensors as large as this rank's share of the parameters.
"""

from collections.abc import Callable
from typing import Any

import torch

from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.stages import RunStage, run_stages
from z2all_ds.base.console import human_bytes
from z2all_ds.base.errors import MachineError
from z2all_ds.ops.visibility import BORDERS_MULTIPLE, document_borders
from z2all_ds.train.speed.graph_conditions import has_sinks
from z2all_ds.zero.ds_config import ResolvedDeepSpeed

FP32_BYTES = 4


def dry_run(engine: Any, run: RunConfig, resolved: ResolvedDeepSpeed, say: Callable[[str], None]) -> None:
    """Log a line for each micro-batch shape; raise if memory does not suffice. Does nothing on a CPU."""
    device = engine.device
    if device.type != "cuda":
        return
    later, in_step = first_step_bytes(engine, resolved), step_bytes(engine, resolved)
    total = torch.cuda.get_device_properties(device).total_memory
    stepping = torch.cuda.memory_allocated(device) + later + in_step
    if stepping > total:
        raise MachineError(
            f"the optimizer step ({resolved.optimizer.kind})",
            f"needs {human_bytes(stepping)}, this GPU has {human_bytes(total)}",
            "Use another optimizer.kind, a JSON that needs less, or more GPUs.",
        )
    # CUDA graphs keep the memory of activations during the step.
    beside = in_step if has_sinks(resolved, run) and run.train.cuda_graphs != "never" else 0
    for stage in distinct_shapes(run_stages(run)):
        shape = f"{stage.micro_batch} x {stage.sequence_length} tokens"
        try:
            need = max(forward_peak_bytes(engine, run, stage) + later + beside, stepping)
        except torch.OutOfMemoryError:
            need = None
        if need is None or need > total:
            raise MachineError(
                f"micro-batches of {shape} (stage {stage.name})",
                f"need more than this GPU's {human_bytes(total)}",
                "Lower train.micro_batch, set train.activation_checkpointing=full, or use a JSON that needs less.",
            )
        say(f"memory: micro-batches of {shape} need about {human_bytes(need)}; {human_bytes(total - need)} left")


def distinct_shapes(stages: list[RunStage]) -> list[RunStage]:
    """Return the first stage of each micro-batch shape."""
    shapes: dict[tuple[int, int], RunStage] = {}
    for stage in stages:
        shapes.setdefault((stage.micro_batch, stage.sequence_length), stage)
    return list(shapes.values())


def first_step_bytes(engine: Any, resolved: ResolvedDeepSpeed) -> int:
    """Return the bytes that the first step allocates on this rank's device and keeps."""
    states = 0 if resolved.offload_optimizer else state_bytes(engine, resolved)
    return states + gradient_bytes(engine, resolved)


def state_bytes(engine: Any, resolved: ResolvedDeepSpeed) -> int:
    """Return the bytes of this rank's optimizer states: its shard, or all of them without ZeRO."""
    share = _parameters(engine) / engine.dp_world_size if resolved.stage else _parameters(engine)
    return int(share * resolved.optimizer.state_bytes_per_parameter)


def gradient_bytes(engine: Any, resolved: ResolvedDeepSpeed) -> int:
    """Return the bytes of gradient sums and communication buckets of DeepSpeed's optimizer for ZeRO stages 1 and 2.

    The other optimizers have already allocated gradients, and with sinks (`gradient_sinks.py`) there are no others.
    """
    optimizer = engine.optimizer
    if resolved.stage == 3 or not hasattr(optimizer, "averaged_gradients"):
        return 0
    # At stage 1 the complete sums are sent after the last micro-batch; at stage 2 the gradients of each micro-batch,
    # and each rank keeps the sum of its shard.
    summed, sums = optimizer.gradient_accumulation_dtype, _parameters(engine)
    sent = summed if resolved.stage == 1 else optimizer.dtype
    buckets = (2 if optimizer.overlap_comm else 1) if optimizer.contiguous_gradients else 0
    share = sums if resolved.stage == 1 else sums / engine.dp_world_size
    return int(buckets * optimizer.reduce_bucket_size * sent.itemsize + share * summed.itemsize)


def step_bytes(engine: Any, resolved: ResolvedDeepSpeed) -> int:
    """Return the bytes that exist only in the step: the optimizer's temporary tensors, for the largest tensor that is
    updated at once, and that tensor's gradient in fp32 unless its memory is counted already."""
    if resolved.offload_optimizer:
        return 0
    optimizer, share = engine.optimizer, -(-_parameters(engine) // engine.dp_world_size)
    updated, copied = share, 0
    if resolved.stage == 0:
        updated = max(p.numel() for p in engine.module.parameters())
    elif resolved.stage == 3:
        updated, copied = min(share, optimizer.sub_group_size), FP32_BYTES
    elif hasattr(optimizer, "averaged_gradients"):
        copied = FP32_BYTES - optimizer.gradient_accumulation_dtype.itemsize
    return int((copied + resolved.optimizer.step_bytes_per_parameter) * updated)


def _parameters(engine: Any) -> int:
    return sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters() if p.requires_grad)


def forward_peak_bytes(engine: Any, run: RunConfig, stage: RunStage) -> int:
    """Return the peak memory allocated by torch while the activations of one micro-batch are alive."""
    device = engine.device
    size = (stage.micro_batch, stage.sequence_length)
    with torch.random.fork_rng(devices=[device]):
        torch.cuda.reset_peak_memory_stats(device)
        try:
            ids = torch.randint(0, run.model.vocab_size, size, device=device)
            positions = torch.arange(stage.sequence_length, device=device).expand(size)
            one_each = torch.zeros_like(ids)
            documents = {"document_ids": one_each, "cu_seqlens": document_borders(one_each, BORDERS_MULTIPLE)}
            masked = documents if run.data.document_mask else {}
            outputs = engine.module(input_ids=ids, position_ids=positions, next_tokens=ids, **masked)
            peak = torch.cuda.max_memory_allocated(device)
            del outputs
        finally:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return peak
