"""Saves an engine to disk from all ranks, and restores it: bit for bit, under the same or any other shape."""

import json
import uuid
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from z2all_ds.base.errors import NotSaved
from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.disk_file import Content, text
from z2all_ds.checkpoint.retention import Retention
from z2all_ds.checkpoint.rng import rng_state, set_rng_state
from z2all_ds.checkpoint.state_files import write_tensors
from z2all_ds.checkpoint.writer import Job, write_checkpoint
from z2all_ds.zero.process_group import from_rank_0, gathered
from z2all_ds.zero.state.engine_state import RankState, index_of, rank_state, read_state


@dataclass(frozen=True)
class SavePlan:
    """The files of one save, by path in the checkpoint, before they are written."""

    step: int
    state: RankState
    own: dict[str, Content]
    """This rank's files other than the state file."""
    common: dict[str, Content]
    """Files that are the same on all ranks."""

    def to_disk(self) -> dict[str, Content]:
        """Return the files that this rank writes; rank 0 writes the common files."""
        state = {self.state.name: partial(write_tensors, self.state.entries, self.state.tensors())}
        return {**state, **self.own, **({} if self.state.rank else self.common)}


def plan_save(engine: Any, step: int, trainer: dict[str, Any], data_state: dict[str, Any]) -> SavePlan:
    """Plan the files of a save. Collective."""
    state = rank_state(engine)
    opaque = state.opaque_files()
    entries_of_ranks, are_opaque = zip(*gathered((state.entries, bool(opaque))), strict=True)

    def write_index(file: Any) -> None:
        text(index_of(engine, list(entries_of_ranks), any(are_opaque)))(file)

    own: dict[str, Content] = {**opaque, layout.rng_name(f"{state.rank:04d}"): partial(torch.save, rng_state())}
    common = {f"{layout.STATE_FOLDER}/{layout.STATE_INDEX}": write_index, **small_files(step, trainer, data_state)}
    return SavePlan(step, state, own, common)


def small_files(step: int, trainer: dict[str, Any], data_state: dict[str, Any]) -> dict[str, Content]:
    """Plan trainer.json and data_state.json."""
    return {
        layout.TRAINER: text(json.dumps({"step": step, **trainer}, indent=1)),
        layout.DATA_STATE: text(json.dumps(data_state)),
    }


def new_job(checkpoints: Path, step: int, retention: Retention, lock_id: list[int] | None = None) -> Job:
    """Return this rank's job for one write. Collective."""
    attempt = from_rank_0(uuid.uuid4().hex[:8])
    return Job(str(checkpoints), step, attempt, dist.get_rank(), dist.get_world_size(), asdict(retention), lock_id)


def save_checkpoint(
    engine: Any,
    checkpoints: Path,
    step: int,
    trainer: dict[str, Any],
    data_state: dict[str, Any],
    retention: Retention,
    lock_id: list[int] | None = None,
) -> Path:
    """Write a checkpoint from the engine's tensors and return when it is on disk. Collective.

    `trainer` and `data_state` are those of rank 0; those of other ranks are ignored.
    """
    files = plan_save(engine, step, trainer, data_state).to_disk()
    # All ranks must learn of a problem, or the others would wait forever.
    problem = from_rank_0(write_checkpoint(new_job(checkpoints, step, retention, lock_id), files, gathered))
    if problem:
        raise not_saved(step, problem, checkpoints)
    return checkpoints / layout.step_name(step)


def not_saved(step: int, problem: str, checkpoints: Path) -> NotSaved:
    """Return the error for a failed save."""
    fix = f"Free space in {checkpoints} and run the same command: it resumes from the newest complete checkpoint."
    return NotSaved(f"checkpoint of step {step}", f"could not be written ({problem})", fix)


def restore(engine: Any, checkpoint: layout.Checkpoint) -> None:
    """Load weights, optimizer and random generators into an engine. Collective."""
    read_state(engine, checkpoint.path)
    own, saved = (
        checkpoint.path / layout.rng_name(f"{dist.get_rank():04d}"),
        sorted(checkpoint.path.glob(layout.rng_name("*"))),
    )
    # With more ranks than at the save, ranks without a file use the file of another rank.
    set_rng_state(torch.load(own if own.exists() else saved[dist.get_rank() % len(saved)], weights_only=True))
