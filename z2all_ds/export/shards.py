"""Weights as safetensors files in Hugging Face's way, written a few megabytes at a time.

Which tensor goes into which file is planned from shapes alone. A file's header holds no values, so it is written first
and the values follow as they are read: memory does not depend on the size of a shard, let alone of the model.
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
from z2all_ds.checkpoint.state_files import DTYPES
from z2all_ds.export.weights import WeightReader
from z2all_ds.model.stock_keys import split_tensor

FILE_NAMES = "model{suffix}.safetensors"
INDEX_NAME = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Part:
    """One tensor of the export: rows of one parameter, one after the other, so one stretch of its values."""

    name: str
    parameter: str
    start: int
    """First of its values inside the parameter."""
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


def exported_parts(shapes: Mapping[str, Iterable[int]], config: LlamaConfig) -> list[Part]:
    """What an export holds, under the stock names and in the model's order."""
    parts = []
    for parameter, shape in shapes.items():
        if parameter == HEAD and config.tie_word_embeddings:
            continue  # it is the embedding
        whole = torch.empty(tuple(shape), device="meta")
        start = 0
        for name, tensor in split_tensor(parameter, whole, config):
            parts.append(Part(name, parameter, start, tuple(tensor.shape)))
            start += tensor.numel()
    return parts


def plan_shards(parts: Iterable[Part], dtype: torch.dtype, max_shard_bytes: int) -> dict[str, list[Part]]:
    """File name -> its tensors. A tensor larger than a shard may be has a file of its own."""
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
    """All files of the plan, and their index where there are several. `advance` hears of the bytes written."""
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
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file that does not say so
    place = 0
    for part in parts:
        end = place + part.num_values * dtype.itemsize
        header[part.name] = {"dtype": DTYPES[dtype], "shape": part.shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            for chunk in reader.chunks(part.parameter, part.start, part.num_values):
                rounded = chunk.to(dtype)
                file.write(rounded.view(torch.uint8).numpy().data)
                advance(rounded.nbytes)
