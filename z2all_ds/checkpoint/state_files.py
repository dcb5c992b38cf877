"""State files: pieces of named tensors in safetensors files, one per rank, and an index with the location of each.

state/
    rank_00000.safetensors   one-dimensional pieces, named KEY:PARAMETER:START
    index.json               shapes, locations of the pieces, and everything that is not a tensor

KEY is `weight` for the master weights, else the optimizer's own name of a state. Any part of a tensor can be read
without the rest.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.foreign_content import explain_content
from z2all_ds.base.json_text import load_json
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.checkpoint.layout import FIX_DAMAGED, STATE_FOLDER, STATE_INDEX, WEIGHT, state_file_name

FORMAT = 1
CHUNK_BYTES = 1 << 26
"""Copied, hashed and written at a time."""
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int16: "I16",
}
TORCH_NAMES = {name: dtype for dtype, name in DTYPES.items()}
file_name = state_file_name


@dataclass(frozen=True)
class Entry:
    """One piece to write."""

    key: str
    parameter: str
    start: int
    length: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.key}:{self.parameter}:{self.start}"

    @property
    def num_bytes(self) -> int:
        return self.length * self.dtype.itemsize


def file_header(entries: list[Entry]) -> bytes:
    """Return the header of a state file; the tensors follow in the same order, without gaps."""
    header: dict[str, Any] = {}
    offset = 0
    for entry in entries:
        offsets = [offset, offset + entry.num_bytes]
        header[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": [entry.length], "data_offsets": offsets}
        offset += entry.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def state_file_size(entries: list[Entry]) -> int:
    """Return the bytes of a state file."""
    return len(file_header(entries)) + sum(entry.num_bytes for entry in entries)


def write_tensors(entries: list[Entry], tensors: Iterable[Tensor], file: Any) -> None:
    """Write a state file from one-dimensional tensors in the order of the entries, one at a time."""
    file.write(file_header(entries))
    for entry, tensor in zip(entries, tensors, strict=True):
        assert tensor.shape == (entry.length,) and tensor.dtype == entry.dtype, entry
        for chunk in tensor.detach().split(CHUNK_BYTES // entry.dtype.itemsize):
            file.write(memoryview(chunk.cpu().contiguous().view(torch.uint8).numpy()))


def build_index(entries_of_ranks: list[list[Entry]], shapes: dict[str, list[int]], facts: dict[str, Any]) -> str:
    """Return index.json for the entries of all ranks."""
    pieces: dict[str, dict[str, list[list[int]]]] = {}
    for rank, entries in enumerate(entries_of_ranks):
        for entry in entries:
            of_parameter = pieces.setdefault(entry.key, {}).setdefault(entry.parameter, [])
            of_parameter.append([entry.start, entry.length, rank])
    for of_key in pieces.values():
        for of_parameter in of_key.values():
            of_parameter.sort()
    return json.dumps({"format": FORMAT, "shapes": shapes, **facts, "pieces": pieces})


def _check_index(index: Mapping[str, Any]) -> None:
    """Raise a ValueError unless the shapes and pieces have the types that `build_index` writes."""
    lists = [pieces for of_key in index["pieces"].values() for pieces in of_key.values()]
    if not all(isinstance(pieces, list) for pieces in lists):
        raise ValueError("pieces that are not a list")
    pieces = [piece for pieces in lists for piece in pieces]
    for what, rows in (("shape", list(index["shapes"].values())), ("piece", pieces)):
        for row in rows:
            if not isinstance(row, list) or not all(type(one) is int and one >= 0 for one in row):
                raise ValueError(f"{what} {row!r}")
    for piece in pieces:
        if len(piece) != 3:
            raise ValueError(f"piece {piece!r}")


class StateReader:
    """Reads the state of one checkpoint from the files of its ranks."""

    open_file: Callable[[Path], Any] = partial(safe_open, framework="pt")
    """Opens a state file; its tensors are memory-mapped, so parts of them are copied only once."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint, self._folder = checkpoint, checkpoint / STATE_FOLDER
        index = self._folder / STATE_INDEX
        if not index.is_file():
            raise CheckpointError(
                checkpoint.name, "has DeepSpeed's own files, written by an older z2all_ds", "Resume with that version."
            )
        with explain_content(CheckpointError, f"checkpoint {checkpoint}", f"wrong {STATE_INDEX}", FIX_DAMAGED):
            self.index: dict[str, Any] = load_json(read_regular(index))
            saved_format = self.index["format"]
            if saved_format == FORMAT:
                _check_index(self.index)
        if saved_format != FORMAT:
            raise CheckpointError(
                checkpoint.name, f"has format {saved_format}, supported is {FORMAT}", "Update z2all_ds."
            )
        self.shapes: dict[str, list[int]] = self.index["shapes"]
        """Shapes of all parameters, by name."""
        self._pieces: dict[str, dict[str, list[list[int]]]] = self.index["pieces"]
        self._files: dict[int, Any] = {}

    @property
    def state_keys(self) -> set[str]:
        """Names of the optimizer's states."""
        return set(self._pieces) - {WEIGHT}

    def read_into(self, target: Tensor, key: str, parameter: str, start: int) -> None:
        """Fill a one-dimensional tensor with the values from element `start` of a parameter on."""
        done, end = start, start + target.numel()
        pieces = self._pieces.get(key, {}).get(parameter, [])
        first_piece = max(bisect_right(pieces, start, key=lambda piece: piece[0]) - 1, 0)
        for first, length, rank in pieces[first_piece:]:
            if done >= end or first > done:
                break
            until = min(end, first + length)
            if until > done:
                piece = self._open(rank).get_slice(f"{key}:{parameter}:{first}")
                target[done - start : until - start].copy_(piece[done - first : until - first])
                done = until
        if done < end:
            raise CheckpointError(
                self._checkpoint.name,
                f"has no {key} of {parameter} from element {done} on",
                "If it was saved with another model, restore its model.* settings.",
            )

    def ranks_needed(self, parameter: str, start: int, length: int) -> set[int]:
        """Return the ranks whose files contain this part of a parameter."""
        pieces = [piece for of_key in self._pieces.values() for piece in of_key.get(parameter, [])]
        return {rank for first, size, rank in pieces if first < start + length and start < first + size}

    def is_whole(self, rank: int) -> bool:
        """Return whether the file of a rank exists and has the size that its header says."""
        try:
            self._open(rank)
        except (OSError, SafetensorError):
            return False
        return True

    def _open(self, rank: int) -> Any:
        if rank not in self._files:
            self._files[rank] = self.open_file(self._folder / file_name(rank))
        return self._files[rank]
