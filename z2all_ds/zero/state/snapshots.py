"""Snapshots: copies of the whole state of a run in this machine's shared memory.

A snapshot has the files of a checkpoint and is read like one: a run rolls back to it without reading a disk, and a
killed run resumes from it on the same machines.
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
from z2all_ds.checkpoint.state_files import Entry, file_header, file_name, state_file_size
from z2all_ds.zero.process_group import gathered
from z2all_ds.zero.state.engine_state import rank_state
from z2all_ds.zero.state.save import SavePlan

CHUNK_BYTES = 1 << 28


def _has_right_size(path: Path, entries: list[Entry]) -> bool:
    return path.exists() and path.stat().st_size == state_file_size(entries)


class MappedStateFile:
    """A state file in shared memory: mapped once, pinned if a GPU copies into it, filled repeatedly."""

    def __init__(self, path: Path, entries: list[Entry], device: torch.device) -> None:
        self.entries = entries
        self._header = file_header(entries)
        size, is_new = state_file_size(entries), not _has_right_size(path, entries)
        if is_new:
            path.unlink(missing_ok=True)
        with path.open("w+b" if is_new else "r+b") as file:
            if is_new:
                # Allocated now: if shared memory runs out later, the process is killed without a message.
                os.posix_fallocate(file.fileno(), 0, size)
            self._bytes = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        if is_new:
            for part in self._bytes.split(CHUNK_BYTES):
                part.zero_()  # page faults happen here, not during a step
        # A GPU copies several times faster into pinned memory. If pinning fails, snapshots only take longer.
        pin = torch.cuda.cudart().cudaHostRegister if device.type == "cuda" else None
        self._is_pinned = pin is not None and int(pin(self._bytes.data_ptr(), size, 0)) == 0

    def fill(self, tensors: Iterable[Tensor]) -> None:
        """Write header and tensors; return when all bytes are copied."""
        offset = len(self._header)
        self._bytes[:offset].copy_(torch.frombuffer(bytearray(self._header), dtype=torch.uint8))
        for entry, tensor in zip(self.entries, tensors, strict=True):
            assert tensor.shape == (entry.length,) and tensor.dtype == entry.dtype, entry
            target = self._bytes[offset : offset + entry.num_bytes]
            source = tensor.detach().contiguous().view(torch.uint8)
            target.copy_(source, non_blocking=True)  # blocks unless a GPU copies into pinned memory
            offset += entry.num_bytes
        if self._is_pinned:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._is_pinned = False


class Snapshots:
    """One rank's part of the snapshots."""

    def __init__(self, folder: SnapshotFolder, run_dir: Path, world: World, device: torch.device) -> None:
        self._folder, self._world, self._device = folder, world, device
        self._files: dict[int, MappedStateFile] = {}
        self._preparing: threading.Thread | None = None
        folder.create(run_dir)

    def prepare(self, engine: Any) -> None:
        """Allocate and pin the memory in a thread during the next steps; tens of gigabytes take seconds."""
        entries = rank_state(engine).entries

        def map_all() -> None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            for slot in range(SLOTS):
                # A complete snapshot of another shape is kept until its slot is overwritten.
                if self._folder.step_in(slot) is None or _has_right_size(self._path(slot), entries):
                    self._mapped(slot, entries)

        self._preparing = threading.Thread(target=map_all, name="preparing-snapshots", daemon=True)
        self._preparing.start()

    def take(self, plan: SavePlan, busy: int | None) -> int:
        """Copy the state to a slot other than `busy`, which is being read, and return its number. Collective."""
        self._wait_until_prepared()
        # Overwrites the older slot. If one is being read, it is complete, so the other may go even if it is newer.
        slot = min((slot for slot in range(SLOTS) if slot != busy), key=lambda slot: self._folder.step_in(slot) or 0)
        path, problem = self._folder.begin(slot), None
        files = plan.own | (plan.common if self._world.local_rank == 0 else {})
        try:
            self._mapped(slot, plan.state.entries).fill(plan.state.tensors())
            for name, content in files.items():
                with (path / name).open("wb") as file:
                    content(file)
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            problem = f"rank {self._world.rank}: {error}"
        if first := next(filter(None, gathered(problem)), None):
            raise CheckpointError(f"snapshot of step {plan.step}", first, "Set checkpoint.background=never.")
        if self._world.local_rank == 0:
            self._folder.finish(slot, plan.step)
        return slot

    def close(self) -> None:
        self._wait_until_prepared()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _wait_until_prepared(self) -> None:
        if self._preparing:
            self._preparing.join()
            self._preparing = None

    def _mapped(self, slot: int, entries: list[Entry]) -> MappedStateFile:
        mapped = self._files.get(slot)
        if mapped is None or mapped.entries != entries:
            if mapped:
                mapped.close()
            self._files[slot] = MappedStateFile(self._path(slot), entries, self._device)
        return self._files[slot]

    def _path(self, slot: int) -> Path:
        return self._folder.slot(slot) / layout.STATE_FOLDER / file_name(self._world.rank)


def why_not_in_memory(engine: Any, world: World, folder: SnapshotFolder) -> str | None:
    """Return why snapshots of this run do not fit on some node, None if they do. Collective.

    Memory that a killed run has left in the folder is reused.
    """
    first_rank_here = world.rank - world.local_rank
    sizes = gathered((first_rank_here, sum(entry.num_bytes for entry in rank_state(engine).entries)))
    needed = SLOTS * sum(size for first_rank, size in sizes if first_rank == first_rank_here)
    no_room = why_no_room(max(0, needed - folder.size_bytes))
    reason = f"{SLOTS} snapshots need {needed / 1e9:.2f} GB of shared memory, and {no_room}" if no_room else None
    return next(filter(None, gathered(reason)), None)
