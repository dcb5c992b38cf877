"""Writes a checkpoint from all ranks; rank 0 seals it."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.rng import rng_state
from z2all_ds.errors import CheckpointError


def save_checkpoint(
    engine: Any, checkpoints: Path, step: int, trainer: dict[str, Any], data_state: dict[str, Any], keep_last: int
) -> Path:
    """Collective: every rank calls it. `trainer` and `data_state` are rank 0's (others' are not looked at)."""
    rank = dist.get_rank()
    temporary = layout.temporary_path(checkpoints, step)
    problem: str | None = None
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    try:
        engine.save_checkpoint(str(temporary), tag=layout.DEEPSPEED_TAG, save_latest=False)
        torch.save(rng_state(), temporary / f"rng_rank_{rank:04d}.pt")
        if rank == 0:
            (temporary / "trainer.json").write_text(json.dumps({"step": step, **trainer}, indent=1), encoding="utf-8")
            (temporary / "data_state.json").write_text(json.dumps(data_state), encoding="utf-8")
    except (OSError, RuntimeError) as error:
        # torch.save reports a full disk as RuntimeError. All ranks must hear of it, or the others wait for ever below.
        problem = f"rank {rank}: {error}"
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if rank == 0 and not any(problems):
        try:
            layout.seal(checkpoints, step)
            layout.prune(checkpoints, keep_last, step)
        except OSError as error:
            problems[0] = f"rank 0: {error}"
    dist.broadcast_object_list(problems, src=0)
    first = next((p for p in problems if p), None)
    if first:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint of step {step}",
            f"could not be written ({first})",
            f"Make room in {checkpoints} and start again: the run goes on from the checkpoint before it.",
        )
    return checkpoints / layout.step_name(step)
