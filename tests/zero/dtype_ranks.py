"""Script for the deepspeed launcher: reads the dtypes that DeepSpeed really uses from its tensors during training.

The file named on the command line holds a JSON list of lists of overrides. For each list, rank 0 writes the dtypes that
were found and those that `resolve` reported to dtypes.json in the same folder. Training runs on the CPU, but the config
is resolved as for a GPU, where `auto` keeps 16 bits.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.comm import comm

from z2all_ds.base.config import load_run_config
from z2all_ds.base.world import World
from z2all_ds.model import Z2allConfig, Z2allForCausalLM
from z2all_ds.ops import Situation, resolve_ops
from z2all_ds.zero import engine as ds
from z2all_ds.zero.ds_config import resolve

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SMALLEST_GRADIENT = 32
"""Number of values; smaller tensors that are reduced are norms and flags."""


def accumulated_in(optimizer: Any, stage: int) -> torch.dtype:
    """Return the dtype of the tensors that hold gradients between two micro-batches."""
    if hasattr(optimizer, "fp32_groups_gradients_flat"):
        flat: torch.dtype = optimizer.fp32_groups_gradients_flat[0].dtype
        return flat
    if stage == 3:
        partitions = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        return next(iter(partitions.values())).dtype
    weight = optimizer.bit16_groups[0][0]
    if optimizer._use_compact_grad_partition_buffer(0):
        # Stage 1 accumulates whole gradients and reduces them once per step; stage 2 accumulates this rank's partition.
        added = getattr(weight, "grad_accum", None)
        return (added if added is not None else optimizer._get_compact_grad_partition_buffer(0).flat_partition).dtype
    held = weight.grad if weight.grad is not None else optimizer.all_grad_tensors[0][0]
    return held.dtype


@contextmanager
def noting_what_is_sent() -> Iterator[set[torch.dtype]]:
    """Record the dtypes of tensors that are summed over ranks, and pass the calls on; yield the set of dtypes."""
    sent: set[torch.dtype] = set()

    def noting(real: Any) -> Any:
        def noted(*arguments: Any, **named: Any) -> Any:
            tensor = next(value for value in (*arguments, *named.values()) if isinstance(value, torch.Tensor))
            if tensor.numel() >= SMALLEST_GRADIENT:
                sent.add(tensor.dtype)
            return real(*arguments, **named)

        return noted

    # DeepSpeed looks up the first two functions at each call, and stores a reference to the third.
    places = [(dist, "all_reduce"), (dist, "reduce"), (comm.cdb, "reduce_scatter_function")]
    kept = [getattr(owner, name) for owner, name in places]
    for (owner, name), real in zip(places, kept, strict=True):
        setattr(owner, name, noting(real))
    try:
        yield sent
    finally:
        for (owner, name), real in zip(places, kept, strict=True):
            setattr(owner, name, real)


def dtypes_under(overrides: list[str], world: World) -> dict[str, Any]:
    run = load_run_config(None, overrides)
    resolved = resolve(run, world.world_size, "cuda")
    ops = resolve_ops(run.ops.model_dump(), Situation("cpu", resolved.dtype, run.model.shape.head_dim))
    config = Z2allConfig.from_section(run.model)
    model = ds.build_model(lambda: Z2allForCausalLM(config, ops), run, resolved, torch.device("cpu"))
    engine = ds.build_engine(model, run, resolved)
    accumulated = None
    with noting_what_is_sent() as sent:
        generator = torch.Generator().manual_seed(world.rank)
        for _ in range(resolved.accumulation):
            ids = torch.randint(0, 64, (2, 17), generator=generator)
            positions = torch.arange(16).expand(2, -1)
            outputs = engine(input_ids=ids[:, :-1], position_ids=positions, next_tokens=ids[:, 1:])
            engine.backward(outputs.loss)
            accumulated = accumulated or accumulated_in(engine.optimizer, resolved.stage)
            engine.step()
    assert accumulated is not None
    in_parts = resolved.stage == 3  # the inner optimizer gets one partition of the master weights at a time
    optimizer = engine.optimizer
    masters = optimizer.fp32_partitioned_groups_flat if in_parts else optimizer.optimizer.param_groups[0]["params"]
    found = {
        "compute": NAMES[next(model.parameters()).dtype],
        "accumulation": NAMES[accumulated],
        "communication": "+".join(sorted(NAMES[dtype] for dtype in sent)),
        "master": NAMES[masters[0].dtype],
    }
    return {"found": found, "said": vars(resolved.dtypes)}


if __name__ == "__main__":
    plan = Path(sys.argv[-1])
    here = World.from_environment()
    ds.start_process_group(here, torch.device("cpu"))
    answers = [dtypes_under(overrides, here) for overrides in json.loads(plan.read_text(encoding="utf-8"))]
    if here.is_main:
        plan.with_name("dtypes.json").write_text(json.dumps(answers), encoding="utf-8")
