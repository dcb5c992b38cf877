"""A run folder with a real checkpoint, written by the package's own writers but without training."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from z2all_ds.base.config import RunConfig, dump_yaml
from z2all_ds.base.config.sections import DataSection, ModelSection, TrainSection
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import layout, writer
from z2all_ds.checkpoint.disk_file import Content, text
from z2all_ds.checkpoint.layout import WEIGHT
from z2all_ds.checkpoint.state_files import Entry, StateReader, build_index, file_name, write_tensors
from z2all_ds.export.weights import WeightReader
from z2all_ds.model import Z2allConfig, Z2allForCausalLM

STEP = 7


def write_run(root: Path, model: ModelSection, corpus: Path, tokenizer: Path, *steps: int) -> RunFolder:
    """Write the config of a run and its checkpoints, by default one of step 7; return the run folder."""
    folder = RunFolder(root)
    run = RunConfig(
        run_dir=str(root),
        model=model,
        data=DataSection(corpus=str(corpus), tokenizer=str(tokenizer)),
        train=TrainSection(steps=10, sequence_length=model.max_position_embeddings, global_batch=8, micro_batch=2),
    )
    root.mkdir(parents=True)
    folder.config.write_text(dump_yaml(run), encoding="utf-8")
    for step in steps or (STEP,):
        write_checkpoint(folder, model, step)
    return folder


def write_checkpoint(folder: RunFolder, model: ModelSection, step: int, /, ranks: int = 2, **trainer: Any) -> Path:
    """Write a checkpoint with random weights, and return its folder; `trainer` is added to trainer.json.

    Each parameter is split over the files of all ranks; only one piece at a time is in memory.
    """
    shapes = weight_shapes(model)
    entries: list[list[Entry]] = [[] for _ in range(ranks)]
    for name, shape in shapes.items():
        cuts = [torch.Size(shape).numel() * rank // ranks for rank in range(ranks + 1)]
        for rank in range(ranks):
            entries[rank].append(Entry(WEIGHT, name, cuts[rank], cuts[rank + 1] - cuts[rank], torch.float32))
    facts = {"step": step, "world_size": ranks, "dtype": "fp32", "deepspeed": "zero2", "lr_of_last_step": 3e-4}
    domains = {"code": [32, "8a51"], "en": [59, "5cf1"], "zh": [149, "18fa"]}
    shares = {"shares": {"code": 0.5, "en": 0.25, "zh": 0.25}}
    files: dict[str, Content] = {
        f"{layout.STATE_FOLDER}/{file_name(rank)}": partial(write_tensors, of_rank, random_pieces(of_rank, step + rank))
        for rank, of_rank in enumerate(entries)
    }
    files[f"{layout.STATE_FOLDER}/{layout.STATE_INDEX}"] = text(build_index(entries, shapes, {}))
    files |= {layout.rng_name(f"{rank:04d}"): text("") for rank in range(ranks)}
    files |= {"trainer.json": text(json.dumps({**facts, **trainer}))}
    files |= {"data_state.json": text(json.dumps({"domains": domains, "stage": shares}))}
    assert writer.write_checkpoint(writer.Job(str(folder.checkpoints), step), files) is None
    return folder.checkpoints / layout.step_name(step)


def read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all master weights under the parameter names of this package."""
    reader = WeightReader(checkpoint)
    return {name: read_whole(reader, name) for name in reader.shapes}


def read_whole(reader: StateReader, parameter: str, key: str = WEIGHT) -> torch.Tensor:
    """Return one whole parameter in its shape."""
    first, _, rank = reader.index["pieces"][key][parameter][0]
    dtype = reader._open(rank).get_slice(f"{key}:{parameter}:{first}")[0:1].dtype
    whole = torch.empty(reader.shapes[parameter], dtype=dtype)
    reader.read_into(whole.view(-1), key, parameter, 0)
    return whole


def checkpoint_of(folder: RunFolder, step: int = STEP) -> Path:
    return folder.checkpoints / layout.step_name(step)


def weight_shapes(model: ModelSection) -> dict[str, list[int]]:
    with torch.device("meta"):
        whole = Z2allForCausalLM(Z2allConfig.from_section(model))
    return {name: list(parameter.shape) for name, parameter in whole.named_parameters()}


def random_pieces(entries: list[Entry], seed: int) -> Iterator[torch.Tensor]:
    """Yield random weights, norms around 1 and all others around 0, so that no layer dominates another."""
    generator = torch.Generator().manual_seed(seed)
    for entry in entries:
        piece = torch.randn(entry.length, generator=generator)
        yield piece.mul_(0.02).add_(1.0 if "norm" in entry.parameter else 0.0)
