"""Writes weights as safetensors files in Hugging Face's layout, a few megabytes at a time.

The tensors of each file are planned from their shapes. A header contains no values, so it is written first, and the
values follow as they are read: memory depends neither on the shard size nor on the model size.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from transformers import LlamaConfig

from z2all_ds.base.console import Advance
from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint.state_files import DTYPES
from z2all_ds.export.weights import WeightReader
from z2all_ds.model import Z2allConfig, Z2allForCausalLM
from z2all_ds.model.stock_keys import split_tensor

FILE_NAMES = "model{suffix}.safetensors"
INDEX_NAME = "model.safetensors.index.json"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Part:
    """One tensor of the export: a contiguous range of the values of one parameter."""

    name: str
    parameter: str
    start: int
    """Index of its first value in the parameter."""
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


def open_parts(checkpoint: Path, config: Z2allConfig) -> tuple[WeightReader, list[Part]]:
    """Return the weights of a checkpoint and the tensors of its export. Raise if they are of another model."""
    with torch.device("meta"):
        expected = {name: list(one.shape) for name, one in Z2allForCausalLM(config).named_parameters()}
    reader = WeightReader(checkpoint)
    for name in sorted({*expected, *reader.shapes}):
        saved, needed = reader.shapes.get(name), expected.get(name)
        if saved != needed:
            rule = f"the shape of {name} is {saved or 'missing'}, in the model of the run {needed or 'missing'}"
            raise CheckpointError(f"checkpoint {checkpoint}", rule, "Restore the model.* settings in run.yaml.")
    return reader, exported_parts(reader.shapes, config)


def exported_parts(shapes: Mapping[str, Iterable[int]], config: LlamaConfig) -> list[Part]:
    """Return the tensors of an export, under Llama's names and in the model's order."""
    parts = []
    for parameter, shape in shapes.items():
        if parameter == HEAD and config.tie_word_embeddings:
            continue
        start = 0
        for name, tensor in split_tensor(parameter, torch.empty(tuple(shape), device="meta"), config):
            parts.append(Part(name, parameter, start, tuple(tensor.shape)))
            start += tensor.numel()
    return parts


def plan_shards(parts: Iterable[Part], dtype: torch.dtype, max_shard_bytes: int) -> dict[str, list[Part]]:
    """Return the tensors of each file. A tensor larger than `max_shard_bytes` has its own file."""
    by_name = {part.name: part for part in parts}
    plan = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda part: part.num_values * dtype.itemsize,
        filename_pattern=FILE_NAMES,
        max_shard_size=max_shard_bytes,
    )
    return {file: [by_name[name] for name in names] for file, names in plan.filename_to_tensors.items()}


def write_shards(
    folder: Path, plan: Mapping[str, list[Part]], reader: WeightReader, dtype: torch.dtype, advance: Advance
) -> None:
    """Write all files of the plan, and an index if there are several; report the bytes written to `advance`."""
    for file, parts in plan.items():
        _write_shard(folder / file, parts, reader, dtype, advance)
    if len(plan) > 1:
        values = sum(part.num_values for parts in plan.values() for part in parts)
        index = {
            "metadata": {"total_parameters": values, "total_size": values * dtype.itemsize},
            "weight_map": {part.name: file for file, parts in plan.items() for part in parts},
        }
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_shard(path: Path, parts: list[Part], reader: WeightReader, dtype: torch.dtype, advance: Advance) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by transformers
    start = 0
    for part in parts:
        end = start + part.num_values * dtype.itemsize
        header[part.name] = {"dtype": DTYPES[dtype], "shape": part.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            for chunk in reader.chunks(part.parameter, part.start, part.num_values, dtype):
                file.write(chunk.view(torch.uint8).numpy().data)
                advance(chunk.nbytes)
