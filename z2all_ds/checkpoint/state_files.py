"""Pieces of named tensors in safetensors files, one a rank, and an index that says where each lies.

state/
    rank_00000.safetensors   one-dimensional pieces, named KEY:PARAMETER:START
    index.json               shapes, where the pieces lie, and what is no tensor

KEY is `weight` for the master weights, else the optimizer's own name of a state. Any part of any tensor can be read
without the rest of it.
"""

import json
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint.layout import STATE_FOLDER, STATE_INDEX, WEIGHT

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


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


@dataclass(frozen=True)
class Entry:
    """One piece to be written."""

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


def header_of(entries: list[Entry]) -> bytes:
    """What a state file begins with; the tensors follow in the same order, without gaps."""
    header: dict[str, Any] = {}
    place = 0
    for entry in entries:
        places = [place, place + entry.num_bytes]
        header[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": [entry.length], "data_offsets": places}
        place += entry.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def state_file_size(entries: list[Entry]) -> int:
    """Returns the bytes of a state file."""
    return len(header_of(entries)) + sum(entry.num_bytes for entry in entries)


def write_tensors(entries: list[Entry], tensors: Iterable[Tensor], file: Any) -> None:
    """Writes a state file: one-dimensional tensors, in the order of the entries and one at a time."""
    file.write(header_of(entries))
    for entry, tensor in zip(entries, tensors, strict=True):
        assert tensor.shape == (entry.length,) and tensor.dtype == entry.dtype, entry
        for chunk in tensor.detach().split(CHUNK_BYTES // entry.dtype.itemsize):
            file.write(memoryview(chunk.cpu().contiguous().view(torch.uint8).numpy()))


class MappedTensors:
    """The tensors of one state file, read where they lie: no copy is made on the way into another tensor."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # Private to this process: nothing that is done to a tensor reaches the file.
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        end = 8 + int.from_bytes(self._bytes[:8], "little")
        self._first, self._header = end, json.loads(self._bytes[8:end])

    def __getitem__(self, name: str) -> Tensor:
        entry = self._header[name]
        (length,), (begin, _) = entry["shape"], entry["data_offsets"]
        dtype = TORCH_NAMES[entry["dtype"]]
        return torch.frombuffer(self._bytes, dtype=dtype, count=length, offset=self._first + begin)


def build_index(entries_of_ranks: list[list[Entry]], shapes: dict[str, list[int]], facts: dict[str, Any]) -> str:
    """index.json, from what every rank has written."""
    pieces: dict[str, dict[str, list[list[int]]]] = {}
    for rank, entries in enumerate(entries_of_ranks):
        for entry in entries:
            of_parameter = pieces.setdefault(entry.key, {}).setdefault(entry.parameter, [])
            of_parameter.append([entry.start, entry.length, rank])
    for of_key in pieces.values():
        for places in of_key.values():
            places.sort()
    return json.dumps({"format": FORMAT, "shapes": shapes, **facts, "pieces": pieces})


class StateReader:
    """The state of one checkpoint, from the rank files that hold it."""

    open_file: Callable[[Path], Any] = MappedTensors
    """Tensors by name, of which parts are taken."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint, self._folder = checkpoint, checkpoint / STATE_FOLDER
        index = self._folder / STATE_INDEX
        if not index.is_file():
            raise CheckpointError(
                checkpoint.name, "holds DeepSpeed's own files, of an older z2all_ds", "Go on with that version."
            )
        self.index: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))
        if self.index["format"] != FORMAT:
            raise CheckpointError(
                checkpoint.name, f"has format {self.index['format']}, known is {FORMAT}", "Update z2all_ds."
            )
        self._pieces: dict[str, dict[str, list[list[int]]]] = self.index["pieces"]
        self._files: dict[int, Any] = {}

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Of all parameters, by name."""
        found: dict[str, list[int]] = self.index["shapes"]
        return found

    @property
    def state_keys(self) -> set[str]:
        """What the optimizer has of each parameter."""
        return set(self._pieces) - {WEIGHT}

    def read_into(self, target: Tensor, key: str, parameter: str, start: int) -> None:
        """Fills a one-dimensional tensor with what lies from `start` on."""
        done, end = start, start + target.numel()
        places = self._pieces.get(key, {}).get(parameter, [])
        position = max(bisect_right(places, start, key=lambda place: place[0]) - 1, 0)
        for first, length, rank in places[position:]:
            if done >= end or first > done:
                break
            until = min(end, first + length)
            if until > done:
                piece = self._open(rank)[f"{key}:{parameter}:{first}"]
                target[done - start : until - start].copy_(piece[done - first : until - first])
                done = until
        if done < end:
            raise CheckpointError(
                self._checkpoint.name,
                f"has no {key} of {parameter} from element {done} on",
                "Is it of another model? Set model.* as it was.",
            )

    def read_whole(self, parameter: str, key: str = WEIGHT) -> Tensor:
        """One parameter in its shape."""
        shape = self.shapes[parameter]
        first, _, rank = self._pieces[key][parameter][0]
        dtype = self._open(rank)[f"{key}:{parameter}:{first}"].dtype
        whole = torch.empty(shape, dtype=dtype)
        self.read_into(whole.view(-1), key, parameter, 0)
        return whole

    def ranks_needed(self, parameter: str, start: int, length: int) -> set[int]:
        """Whose files hold this part of a parameter."""
        places = [place for of_key in self._pieces.values() for place in of_key.get(parameter, [])]
        return {rank for first, size, rank in places if first < start + length and start < first + size}

    def _open(self, rank: int) -> Any:
        if rank not in self._files:
            self._files[rank] = self.open_file(self._folder / file_name(rank))
        return self._files[rank]
