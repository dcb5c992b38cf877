"""Reads master weights from a checkpoint in small pieces, without memory-mapping its files.

Pages of a mapped file count as memory of the process that touched them, and a writable mapping counts in full against a
limit on data. Plain reads hold only the requested values in memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.foreign_content import explain_content
from z2all_ds.base.json_text import load_json
from z2all_ds.base.llama_folder import LONGEST_HEADER_BYTES
from z2all_ds.checkpoint.layout import WEIGHT
from z2all_ds.checkpoint.state_files import TORCH_NAMES, StateReader

CHUNK_VALUES = 1 << 22
"""Values read and converted at a time: 16 MiB of fp32."""
FIX = "Restore the checkpoint from a copy."


@dataclass(frozen=True)
class _StateFile:
    """A state file, read on demand."""

    path: Path

    def get_slice(self, name: str) -> "_StatePiece":
        header, values_start = self._header
        if name not in header:
            raise CheckpointError(f"{self.path}", f"has no {name}", FIX)
        facts = header[name]
        with explain_content(CheckpointError, f"{self.path}", f"has a wrong entry for {name}", FIX):
            start = values_start + facts["data_offsets"][0]
            return _StatePiece(self.path, start, TORCH_NAMES[facts["dtype"]], facts["shape"][0])

    @cached_property
    def _header(self) -> tuple[dict[str, Any], int]:
        """The header, and the offset of the values in the file."""
        with explain_content(CheckpointError, f"{self.path}", "is not readable", FIX), self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = load_json(file.read(min(length, LONGEST_HEADER_BYTES)))
            return header, 8 + length


@dataclass(frozen=True)
class _StatePiece:
    """A one-dimensional tensor in a state file; slices are read from disk."""

    path: Path
    start: int
    """Offset in the file, in bytes."""
    dtype: torch.dtype
    length: int

    def __getitem__(self, wanted: slice) -> Tensor:
        with explain_content(CheckpointError, f"{self.path}", "is not readable", FIX):
            first, end, _ = wanted.indices(self.length)
            num_bytes, offset = (end - first) * self.dtype.itemsize, self.start + first * self.dtype.itemsize
            content = np.fromfile(self.path, np.uint8, num_bytes, offset=offset)
        if len(content) < num_bytes:
            raise CheckpointError(f"{self.path}", "is truncated", FIX)
        return torch.from_numpy(content).view(self.dtype)


class WeightReader(StateReader):
    """The master weights of a checkpoint, by plain reads."""

    open_file = _StateFile

    def chunks(self, parameter: str, start: int, length: int, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
        """Yield the values from element `start` on in `dtype`, as one-dimensional tensors."""
        for first in range(start, start + length, CHUNK_VALUES):
            chunk = torch.empty(min(CHUNK_VALUES, start + length - first))
            self.read_into(chunk, WEIGHT, parameter, first)
            yield chunk.to(dtype)

    def fill(self, target: Tensor, parameter: str, start: int, dtype: torch.dtype = torch.float32) -> None:
        """Fill `target`, of any dtype and device, with values from element `start` on, first rounded to `dtype`."""
        flat, done = target.view(-1), 0
        for chunk in self.chunks(parameter, start, flat.numel(), dtype):
            flat[done : done + len(chunk)].copy_(chunk)
            done += len(chunk)

    def read_rounded(self, parameter: str, dtype: torch.dtype) -> Tensor:
        """Return one parameter in fp32, with its values rounded to `dtype`."""
        whole = torch.empty(self.shapes[parameter])
        self.fill(whole, parameter, 0, dtype)
        return whole
