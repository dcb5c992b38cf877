"""Snapshots: the whole state of a run, copied into this machine's shared memory in the time of that copy.

A snapshot has the files of a checkpoint, so it is read like one: a run goes back to it without touching a disk, and a
run that was killed goes on from it on the same machines.
"""

import mmap
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.world import World
from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.memory import SLOTS, SnapshotFolder, why_no_room
from z2all_ds.checkpoint.state_files import Entry, file_name, header_of, state_file_size
from z2all_ds.zero.collective import gathered
from z2all_ds.zero.state.engine_state import rank_state
from z2all_ds.zero.state.save import SavePlan

ZEROED_AT_ONCE = 1 << 28


def _has_room(path: Path, entries: list[Entry]) -> bool:
    """Whether the file that is there is of just this size."""
    return path.exists() and path.stat().st_size == state_file_size(entries)


class MappedStateFile:
    """A state file in shared memory: mapped once, pinned where a GPU copies into it, filled again and again."""

    def __init__(self, path: Path, entries: list[Entry], device: torch.device) -> None:
        self.entries = entries
        self._header = header_of(entries)
        size, is_new = state_file_size(entries), not _has_room(path, entries)
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
        # A GPU copies into pinned memory by itself, several times as fast; without it a snapshot only takes longer.
        pin = torch.cuda.cudart().cudaHostRegister if device.type == "cuda" else None
        self._is_pinned = pin is not None and int(pin(self._bytes.data_ptr(), size, 0)) == 0

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
        if self._is_pinned:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._is_pinned = False


class Snapshots:
    """One rank's part of them. Methods are collective, but for `prepare` and `close`."""

    def __init__(self, folder: SnapshotFolder, run_dir: Path, world: World, device: torch.device) -> None:
        self._folder, self._world, self._device = folder, world, device
        self._files: dict[int, MappedStateFile] = {}
        self._preparing: threading.Thread | None = None
        folder.create(run_dir)

    def prepare(self, engine: Any) -> None:
        """Makes the memory ready beside the next steps: seconds, for tens of gigabytes that are to be pinned."""
        entries = rank_state(engine).entries

        def map_all() -> None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            for number in range(SLOTS):
                # A whole snapshot of another shape is left alone until its turn to be written over comes.
                if self._folder.step_in(number) is None or _has_room(self._path(number), entries):
                    self._mapped(number, entries)

        self._preparing = threading.Thread(target=map_all, name="preparing-snapshots", daemon=True)
        self._preparing.start()

    def take(self, plan: SavePlan, busy: int | None) -> int:
        """Copies the state into a slot and returns its number; `busy` is one that is being read. Collective."""
        if self._preparing:
            self._preparing.join()
            self._preparing = None
        number, problem = self._next(busy), None
        slot = self._folder.begin(number)
        files = plan.own | (plan.common if self._world.local_rank == 0 else {})
        try:
            self._mapped(number, plan.state.entries).fill(plan.state.tensors())
            for name, content in files.items():
                with (slot / name).open("wb") as file:
                    content(file)
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            problem = f"rank {self._world.rank}: {error}"
        if first := next(filter(None, gathered(problem)), None):
            raise CheckpointError(f"snapshot of step {plan.step}", first, "Set checkpoint.background=never.")
        if self._world.local_rank == 0:
            self._folder.finish(number, plan.step)
        return number

    def close(self) -> None:
        if self._preparing:
            self._preparing.join()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _next(self, busy: int | None) -> int:
        """Never the only whole one. One that is being read is whole, so the other may go, even if it is newer."""
        steps = {number: self._folder.step_in(number) or 0 for number in range(SLOTS) if number != busy}
        return min(steps, key=lambda number: steps[number])

    def _mapped(self, number: int, entries: list[Entry]) -> MappedStateFile:
        mapped = self._files.get(number)
        if mapped is None or mapped.entries != entries:
            if mapped:
                mapped.close()
            self._files[number] = MappedStateFile(self._path(number), entries, self._device)
        return self._files[number]

    def _path(self, number: int) -> Path:
        return self._folder.slot(number) / layout.STATE_FOLDER / file_name(self._world.rank)


def why_not_in_memory(engine: Any, world: World, folder: SnapshotFolder) -> str | None:
    """Why snapshots of this run do not fit on some node; None where they do. Collective.

    Memory that a killed run has left in the folder is used again.
    """
    first_rank_here = world.rank - world.local_rank
    sizes = gathered((first_rank_here, sum(entry.num_bytes for entry in rank_state(engine).entries)))
    needed = SLOTS * sum(size for first_rank, size in sizes if first_rank == first_rank_here)
    no_room = why_no_room(max(0, needed - folder.size_bytes))
    reason = f"{SLOTS} snapshots take {needed / 1e9:.2f} GB of a machine's memory, and {no_room}" if no_room else None
    return next(filter(None, gathered(reason)), None)
