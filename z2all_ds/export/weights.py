"""Master weights out of a checkpoint, some of them at a time, without mapping its files into memory.

The pages of a mapped file count as memory of the process that has touched them, and all of the file counts against a
limit on data where it is mapped writable. Read plainly, only what was asked for is in memory.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint.layout import WEIGHT
from z2all_ds.checkpoint.state_files import TORCH_NAMES, StateReader

CHUNK_VALUES = 1 << 22
"""Read and rounded at a time: 16 MiB of fp32."""


@dataclass(frozen=True)
class _PlainFile:
    """A state file that stays on the disk."""

    path: Path

    def get_slice(self, name: str) -> "_PlainPiece":
        header, begin = self._header
        if name not in header:
            raise CheckpointError(f"{self.path}", f"has no {name}", "Restore the checkpoint from a copy.")
        return _PlainPiece(self.path, begin + header[name]["data_offsets"][0], header[name])

    @cached_property
    def _header(self) -> tuple[dict[str, Any], int]:
        """By piece; and where the values begin."""
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
            return header, 8 + length


@dataclass(frozen=True)
class _PlainPiece:
    path: Path
    begin: int
    facts: dict[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_NAMES[self.facts["dtype"]]

    def __getitem__(self, wanted: slice) -> Tensor:
        dtype = self.dtype
        first, end, _ = wanted.indices(self.facts["shape"][0])
        values = torch.empty(max(end - first, 0), dtype=dtype)
        left = values.view(torch.uint8).numpy().data
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.begin + first * dtype.itemsize)
            while left:
                count = file.readinto(left)
                if not count:
                    raise CheckpointError(f"{self.path}", "ends too early", "Restore the checkpoint from a copy.")
                left = left[count:]
        return values


class WeightReader(StateReader):
    """A checkpoint's master weights by plain reads; in fp32 or as they were kept."""

    open_file = _PlainFile

    def chunks(self, parameter: str, start: int, length: int) -> Iterator[Tensor]:
        """Values from element `start` on, one-dimensional, in fp32."""
        for first in range(start, start + length, CHUNK_VALUES):
            chunk = torch.empty(min(CHUNK_VALUES, start + length - first))
            self.read_into(chunk, WEIGHT, parameter, first)
            yield chunk

    def read_rounded(self, parameter: str, dtype: torch.dtype) -> Tensor:
        """One parameter in fp32, with the values it has in `dtype`."""
        whole = torch.empty(self.shapes[parameter])
        flat, done = whole.view(-1), 0
        for chunk in self.chunks(parameter, 0, whole.numel()):
            flat[done : done + len(chunk)] = chunk.to(dtype)
            done += len(chunk)
        return whole
