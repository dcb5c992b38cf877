"""Makes a checkpoint of ours out of DeepSpeed's own: the same bits of masters and moments, in our files.

Piece by piece: DeepSpeed's files are mapped, not loaded, and a rank's file there becomes a rank's file here.
"""

import math
import random
import shutil
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.disk_file import Content, text
from z2all_ds.checkpoint.rng import rng_name, rng_state, set_rng_state
from z2all_ds.checkpoint.state_files import Entry, build_index, file_name, write_tensors
from z2all_ds.checkpoint.writer import Job, write_checkpoint
from z2all_ds.zero.state.deepspeed_folders import MOMENTS, DeepSpeedFolder
from z2all_ds.zero.state.engine_state import loss_scale, require_same_model
from z2all_ds.zero.state.save import small_files

PARAMETER_GROUPS = 2
"""Of every run of ours: what decays and what does not."""


def import_folder(
    source: DeepSpeedFolder,
    checkpoints: Path,
    shapes: dict[str, list[int]],
    data_state: dict[str, Any],
    seed: int,
) -> Path:
    """The checkpoint of the step the source stands at. `shapes` are those of the model that will go on."""
    require_same_model(f"{source.path}", source.shapes, "the configured model", shapes)
    step = source.counters["global_steps"]
    _refuse_what_is_there(checkpoints, step)
    files: dict[str, Content] = {
        **_state_files(source, shapes),
        rng_name("0000"): partial(torch.save, _seeded_generators(seed)),
        **small_files(step, _facts(source), data_state),
    }
    job = Job(str(checkpoints), step, attempt=uuid.uuid4().hex[:8])
    try:
        problem = write_checkpoint(job, files)
    finally:
        shutil.rmtree(job.temporary, ignore_errors=True)  # after a Ctrl-C; a whole one has its name already
    if problem:
        rule = f"could not be written ({problem})"
        raise CheckpointError(f"checkpoint of step {step}", rule, f"Make room in {checkpoints}.")
    return checkpoints / layout.step_name(step)


def _state_files(source: DeepSpeedFolder, shapes: dict[str, list[int]]) -> dict[str, Content]:
    """Plans a state file per rank of the source, and the index."""
    entries_of_ranks, files, taken = [], dict[str, Content](), set[float | None]()
    for rank in range(source.ranks):
        flats = list(source.flats(rank))
        taken |= {flat.steps_taken for flat in flats if flat.pieces}
        entries = [
            Entry(key, piece.name, piece.start, piece.length, tensor.dtype)
            for flat in flats
            for key, tensor in flat.tensors.items()
            for piece in flat.pieces
        ]
        files[f"{layout.STATE_FOLDER}/{file_name(rank)}"] = partial(write_tensors, entries, _pieces(source, rank))
        entries_of_ranks.append(entries)
    if len(taken) != 1:
        what = f"{source.path}: parameters that were stepped {sorted(map(str, taken))} times"
        raise CheckpointError(what, "a run steps all of them together", "It cannot be taken over.")
    (steps_taken,) = taken
    _require_whole(source, [entry for entries in entries_of_ranks for entry in entries], shapes, steps_taken)
    facts = {
        "ranks": source.ranks,
        "optimizer": source.optimizer_kind,
        "steps_taken": [steps_taken] * PARAMETER_GROUPS,
        "engine": source.counters,
        "loss_scale": loss_scale(source.loss_scaler),
        "is_opaque": False,
    }
    files[f"{layout.STATE_FOLDER}/{layout.STATE_INDEX}"] = text(build_index(entries_of_ranks, shapes, facts))
    return files


def _pieces(source: DeepSpeedFolder, rank: int) -> Iterator[Tensor]:
    """In the order of the entries; the source's files are opened when they are written."""
    for flat in source.flats(rank):
        for tensor in flat.tensors.values():
            for piece in flat.pieces:
                yield tensor[piece.offset : piece.offset + piece.length]


def _facts(source: DeepSpeedFolder) -> dict[str, Any]:
    """trainer.json, as far as the source tells: no rates, no guard, no loss of fixed tokens."""
    return {
        "world_size": source.ranks,
        "zero_stage": source.zero_stage,
        "offload_optimizer": source.is_offloaded,
        "dtype": source.dtype,
        "deepspeed": f"zero{source.zero_stage}{'_offload' if source.is_offloaded else ''}",
        "imported_from": source.path.name,
    }


def _seeded_generators(seed: int) -> dict[str, Any]:
    """As a run with this seed begins."""
    before = rng_state()
    try:
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        return rng_state()
    finally:
        set_rng_state(before)


def _require_whole(
    source: DeepSpeedFolder, entries: list[Entry], shapes: dict[str, list[int]], steps_taken: float | None
) -> None:
    """Every value of every parameter once."""
    keys = [layout.WEIGHT, *(MOMENTS if steps_taken is not None else ())]
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        found.setdefault((entry.key, entry.parameter), []).append(entry)
    for key in keys:
        for name, shape in shapes.items():
            place = 0
            for entry in sorted(found.get((key, name), []), key=lambda entry: entry.start):
                if entry.start != place:
                    break
                place += entry.length
            if place != math.prod(shape):
                rule = f"{key} of {name} is not whole: {place} of {math.prod(shape)} values"
                raise CheckpointError(f"{source.path}", rule, "Give a whole one.")


def _refuse_what_is_there(checkpoints: Path, step: int) -> None:
    there = [path for path in layout.sealed(checkpoints) if layout.step_of(path) >= step]
    if there:
        same = layout.step_of(there[0]) == step
        rule = "is there already" if same else f"would lie behind {there[-1].name}, from which a run goes on"
        what = f"{checkpoints / layout.step_name(step)}"
        raise CheckpointError(what, rule, "Give another run folder, or take that checkpoint away.")
