"""Writes a checkpoint from all ranks; rank 0 seals it."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from z2all_ds.base.errors import NotSaved
from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.retention import Retention, prune
from z2all_ds.checkpoint.rng import rng_name, rng_state
from z2all_ds.zero.collective import from_rank_0, gathered
from z2all_ds.zero.state.engine_state import write_index, write_state


def save_checkpoint(
    engine: Any,
    checkpoints: Path,
    step: int,
    trainer: dict[str, Any],
    data_state: dict[str, Any],
    retention: Retention | None = None,
) -> Path:
    """Collective: every rank calls it. `trainer` and `data_state` are rank 0's (others' are not looked at).

    With a retention, older ones that it does not keep are deleted before it returns.
    """
    rank = dist.get_rank()
    temporary = layout.temporary_path(checkpoints, step)
    # All ranks must hear of a problem, or the others wait for ever.
    problem = from_rank_0(_make_empty(temporary) if rank == 0 else None)
    written = None
    if problem is None:
        try:
            written = write_state(engine, temporary)
            torch.save(rng_state(), temporary / rng_name(f"{rank:04d}"))
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            problem = f"rank {rank}: {error}"
    of_ranks: list[Any] = gathered((written, problem))
    problems = [problem for _, problem in of_ranks]
    if rank == 0 and not any(problems):
        try:
            write_index(engine, temporary, [written for written, _ in of_ranks])
            for name, content in small_files(step, trainer, data_state).items():
                (temporary / name).write_text(content, encoding="utf-8")
            known = {name: entry for written, _ in of_ranks for name, entry in written.files.items() if entry}
            layout.seal(checkpoints, step, known)
            if retention:
                prune(checkpoints, retention, step)
        except OSError as error:
            problems[0] = f"rank 0: {error}"
    first = next(filter(None, from_rank_0(problems)), None)
    if first:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise could_not_be_written(step, first, checkpoints)
    return checkpoints / layout.step_name(step)


def _make_empty(temporary: Path) -> str | None:
    """Returns why it cannot."""
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        (temporary / layout.STATE_FOLDER).mkdir(parents=True)
    except OSError as error:
        return f"rank 0: {error}"
    return None


def could_not_be_written(step: int, problem: str, checkpoints: Path) -> NotSaved:
    what = f"checkpoint of step {step}"
    fix = f"Make room in {checkpoints} and start again: the run goes on from the newest one that is whole."
    return NotSaved(what, f"could not be written ({problem})", fix)


def small_files(step: int, trainer: dict[str, Any], data_state: dict[str, Any]) -> dict[str, str]:
    """What a checkpoint has beside tensors and the index."""
    return {
        layout.TRAINER: json.dumps({"step": step, **trainer}, indent=1),
        layout.DATA_STATE: json.dumps(data_state),
    }
