"""A state file in shared memory that is filled again and again: mapped once, and pinned where a GPU copies into it."""

import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from z2all_ds.checkpoint.state_files import Entry, header_of

ZEROED_AT_ONCE = 1 << 28


def has_room(path: Path, entries: list[Entry]) -> bool:
    """Whether the file that is there is of just this size."""
    return path.exists() and path.stat().st_size == size_of(entries)


def size_of(entries: list[Entry]) -> int:
    return len(header_of(entries)) + sum(entry.num_bytes for entry in entries)


class MappedStateFile:
    """One file of a fixed layout. What it holds is not touched before it is filled."""

    def __init__(self, path: Path, entries: list[Entry], device: torch.device) -> None:
        self.entries = entries
        self._header = header_of(entries)
        size, is_new = size_of(entries), not has_room(path, entries)
        if is_new:
            path.unlink(missing_ok=True)
        with path.open("w+b" if is_new else "r+b") as file:
            if is_new:
                # All of it now: shared memory that runs out later ends the process, without a word.
                os.posix_fallocate(file.fileno(), 0, size)
            self._bytes = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        if is_new:
            for part in self._bytes.split(ZEROED_AT_ONCE):
                part.zero_()  # each page is found once, not in the middle of a step
        self._unpin = _pin(self._bytes) if device.type == "cuda" else None

    def fill(self, tensors: Iterable[Tensor]) -> None:
        """Returns when all bytes are there."""
        place = len(self._header)
        self._bytes[:place].copy_(torch.frombuffer(bytearray(self._header), dtype=torch.uint8))
        for entry, tensor in zip(self.entries, tensors, strict=True):
            assert tensor.shape == (entry.length,) and tensor.dtype == entry.dtype, entry
            target = self._bytes[place : place + entry.num_bytes]
            source = tensor.detach().contiguous().view(torch.uint8)
            target.copy_(source, non_blocking=True)  # waits all the same, unless a GPU copies into pinned memory
            place += entry.num_bytes
        if self._unpin:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        if self._unpin:
            self._unpin()
            self._unpin = None


def _pin(memory: Tensor) -> Callable[[], None] | None:
    """A GPU copies into pinned memory by itself, several times as fast; without it the snapshot only takes longer."""
    cudart = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) != 0:
        return None

    def unpin() -> None:
        cudart.cudaHostUnregister(memory.data_ptr())

    return unpin
