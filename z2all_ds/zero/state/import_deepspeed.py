"""`z2all checkpoint import`: converts a folder written by DeepSpeed to a checkpoint that a configured run resumes from.

Master weights and moments are copied bit for bit. DeepSpeed's files are memory-mapped and copied piece by piece; each
rank's file becomes a rank's file of the checkpoint.
"""

import math
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from z2all_ds.base.config import RunConfig, anchored, load_run_config
from z2all_ds.base.config.stages import run_stages, samples_seen
from z2all_ds.base.errors import CheckpointError, ConfigError
from z2all_ds.base.paths import full_path
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import layout, memory
from z2all_ds.checkpoint.disk_file import Content, text
from z2all_ds.checkpoint.rng import rng_state, seed_everything
from z2all_ds.checkpoint.state_files import Entry, build_index, file_name, write_tensors
from z2all_ds.checkpoint.writer import Job, write_checkpoint
from z2all_ds.data.data_plan import DataPlan
from z2all_ds.data.run_spec import open_tokenizer, stream_spec
from z2all_ds.data.state import READABLE_VERSIONS
from z2all_ds.model import Z2allConfig, Z2allForCausalLM
from z2all_ds.tokenizer.tokenization_z2all import Z2allTokenizer
from z2all_ds.zero.state.deepspeed_folders import MOMENTS, DeepSpeedFolder
from z2all_ds.zero.state.engine_state import loss_scale, require_same_model
from z2all_ds.zero.state.optimizer_shards import entries_of
from z2all_ds.zero.state.save import small_files

DATA_STATE_KEY = "data_state"
"""Key in client_state of a data state, for programs that save with DeepSpeed and read data with this package."""
PARAMETER_GROUPS = 2
"""Every run has two: parameters with and without weight decay."""


def import_deepspeed(source: Path, run_dir: Path | None, config: str | None, overrides: list[str]) -> list[str]:
    """Import a folder and return the lines to print. Refuse an unsuitable folder before anything is written."""
    run, folder = _configured_run(run_dir, config, overrides)
    tokenizer = open_tokenizer(run)
    os.environ["DS_ACCELERATOR"] = "cpu"  # keeps DeepSpeed from looking for GPUs
    saved = DeepSpeedFolder(full_path(source))
    step = saved.counters["global_steps"]
    data_state, about_data = _data_state(saved.client_state, step, run, tokenizer)
    with torch.device("meta"):
        model = Z2allForCausalLM(Z2allConfig.from_section(run.model, **tokenizer.model_token_ids))
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters()}
    with ExitStack() as stack:
        stack.callback(os.close, folder.acquire_lock())
        path = import_folder(saved, folder.checkpoints, shapes, data_state, run.train.seed)
        memory.end_lineage(folder)
    stage = f"ZeRO {saved.zero_stage}, {saved.dtype}, {saved.ranks} {'rank' if saved.ranks == 1 else 'ranks'}"
    about_random = f"random generators: seeded by train.seed={run.train.seed}"
    return [f"{path}: step {step} of {saved.path.name} ({stage})", about_data, about_random]


def _configured_run(run_dir: Path | None, config: str | None, overrides: list[str]) -> tuple[RunConfig, RunFolder]:
    """Return config and folder of the run: from the folder's run.yaml, from a config, or one from each."""
    root = full_path(run_dir) if run_dir else None
    if config is None:
        if root is None:
            fix = "Give --run RUN_FOLDER or --config run.yaml."
            raise ConfigError("checkpoint import", "needs the run that is to resume", fix)
        if not RunFolder(root).config.is_file():
            raise CheckpointError(f"{root}", "has no run.yaml", "Give the run's config too: --config run.yaml.")
        config = str(RunFolder(root).config)
    run = anchored(load_run_config(config, overrides))
    return run, RunFolder(root or full_path(run.run_dir))


def _data_state(
    client_state: dict[str, Any], step: int, run: RunConfig, tokenizer: Z2allTokenizer
) -> tuple[dict[str, Any], str]:
    """Return the data state of the source or, if it has none, that of the step with every lane at its first document,
    and a line about it.

    Samples are numbered from the step, so that stages, mixture and assignment to ranks are those of the run. The step
    does not determine which documents were read; that would require reading all of them.
    """
    carried = client_state.get(DATA_STATE_KEY)
    if isinstance(carried, dict) and carried.get("version") in READABLE_VERSIONS:
        return carried, f"data: continues at sample {carried['position']}, from the source's client_state"
    plan = DataPlan.open(replace(stream_spec(run), skip=()), tokenizer)
    position = samples_seen(run_stages(run), step)
    state = plan.state_at(position, plan.fresh_lanes(range(run.num_lanes)))
    return dict(state), f"data: samples numbered from {position}, reading from the first document of every domain"


def import_folder(
    source: DeepSpeedFolder, checkpoints: Path, shapes: dict[str, list[int]], data_state: dict[str, Any], seed: int
) -> Path:
    """Write the checkpoint of the source's step. `shapes` are those of the configured model."""
    require_same_model(f"{source.path}", source.shapes, "the configured model", shapes)
    step = source.counters["global_steps"]
    saved = set(map(layout.step_of, layout.sealed_folders(checkpoints)))
    if (newest := max(saved, default=-1)) >= step:
        rule = "exists" if step in saved else f"is older than {layout.step_name(newest)}, from which the run resumes"
        fix = "Give another run folder, or remove that checkpoint."
        raise CheckpointError(f"{checkpoints / layout.step_name(step)}", rule, fix)
    seed_everything(seed)
    files: dict[str, Content] = {
        **_state_files(source, shapes),
        layout.rng_name("0000"): partial(torch.save, rng_state()),
        **small_files(step, _trainer(source), data_state),
    }
    job = Job(str(checkpoints), step, attempt=uuid.uuid4().hex[:8])
    try:
        problem = write_checkpoint(job, files)
    finally:
        shutil.rmtree(job.temporary, ignore_errors=True)  # after a Ctrl-C; a complete one has its final name
    if problem:
        rule = f"could not be written ({problem})"
        raise CheckpointError(f"checkpoint of step {step}", rule, f"Free space in {checkpoints}.")
    return checkpoints / layout.step_name(step)


def _state_files(source: DeepSpeedFolder, shapes: dict[str, list[int]]) -> dict[str, Content]:
    """Plan a state file per rank of the source, and the index."""
    entries_of_ranks, files, taken = [], dict[str, Content](), set[float | None]()
    for rank in range(source.ranks):
        shards = list(source.shards(rank))
        taken |= {shard.steps_taken for shard in shards if shard.pieces}
        entries = [entry for shard in shards for entry in entries_of(shard.tensors, shard.pieces)]
        files[f"{layout.STATE_FOLDER}/{file_name(rank)}"] = partial(write_tensors, entries, _tensors(source, rank))
        entries_of_ranks.append(entries)
    if len(taken) != 1:
        what = f"{source.path}: step counts of the parameters are {sorted(map(str, taken))}"
        raise CheckpointError(what, "they must be equal", "It cannot be imported.")
    (steps_taken,) = taken
    keys = [layout.WEIGHT, *(MOMENTS if steps_taken is not None else ())]
    _require_complete(source, [entry for entries in entries_of_ranks for entry in entries], shapes, keys)
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


def _tensors(source: DeepSpeedFolder, rank: int) -> Iterator[Tensor]:
    """Yield the tensors in the order of the entries. Open the source's files only when it is iterated."""
    for shard in source.shards(rank):
        for tensor in shard.tensors.values():
            yield from (piece.of(tensor) for piece in shard.pieces)


def _require_complete(
    source: DeepSpeedFolder, entries: list[Entry], shapes: dict[str, list[int]], keys: list[str]
) -> None:
    """Check that the entries cover every value of every parameter."""
    covered: Counter[tuple[str, str]] = Counter()
    for entry in sorted(entries, key=lambda entry: entry.start):
        if entry.start == covered[entry.key, entry.parameter]:
            covered[entry.key, entry.parameter] += entry.length
    for key in keys:
        for name, shape in shapes.items():
            if covered[key, name] != math.prod(shape):
                rule = f"{key} of {name} is incomplete: {covered[key, name]} of {math.prod(shape)} values"
                raise CheckpointError(f"{source.path}", rule, "Give a complete folder.")


def _trainer(source: DeepSpeedFolder) -> dict[str, Any]:
    """Return the content of trainer.json: without learning rates, guard statistics and loss of fixed tokens, which
    the source does not have."""
    return {
        "world_size": source.ranks,
        "zero_stage": source.zero_stage,
        "offload_optimizer": source.is_offloaded,
        "dtype": source.dtype,
        "deepspeed": f"zero{source.zero_stage}{'_offload' if source.is_offloaded else ''}",
        "imported_from": source.path.name,
    }
