"""Snapshots: copies of the whole state of a run in this machine's shared memory.

A snapshot has the files of a checkpoint and is read like one: a run rolls back to it without reading a disk, and a
killed run resumes from it on the same machines.
"""

import mmap
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.world import World
from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.disk_file import write_file
from z2all_ds.checkpoint.memory import SLOTS, SnapshotFolder, why_no_room
from z2all_ds.checkpoint.snapshot_check import WordSum, header_sum, state_file_entry
from z2all_ds.checkpoint.state_files import Entry, file_header, file_name, state_file_size
from z2all_ds.zero.process_group import gathered
from z2all_ds.zero.state.engine_state import rank_state
from z2all_ds.zero.state.save import SavePlan

CHUNK_BYTES = 1 << 28
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SUMMED_BYTES = 1 << 26
"""Summed and copied at a time; values that are not aligned to words take as much temporary memory."""


def _has_right_size(path: Path, entries: list[Entry]) -> bool:
    return path.exists() and path.stat().st_size == state_file_size(entries)


@dataclass
class _WordSums:
    """Sums of the words of a state file, added up on the device that holds the tensors."""

    found: list[tuple[int, int, Tensor]] = field(default_factory=list)
    """Bytes per word, number of words and sum, in the order of the file."""

    def add(self, values: Tensor) -> None:
        """Add words of 8 bytes, and the values that do not fill one."""
        size = values.dtype.itemsize
        rest = len(values) % (8 // size)
        words, tail = values.split([len(values) - rest, rest])
        if words.storage_offset() * size % 8:  # torch views only aligned values as words
            words = words.clone()
        self._append(8, words.nbytes // 8, words.view(torch.int64).sum())
        if rest:
            self._append(size, rest, tail.view(INTEGERS[size]).sum(dtype=torch.int64))

    def _append(self, size: int, count: int, total: Tensor) -> None:
        if self.found and self.found[-1][0] == size and self.found[-1][2].device == total.device:
            _, count_before, total_before = self.found.pop()
            count, total = count_before + count, total_before + total
        self.found.append((size, count, total))

    def on_host(self) -> list[WordSum]:
        return [(size, count, int(total)) for size, count, total in self.found]


class SnapshotLost(CheckpointError):
    """The snapshot could not be taken on some rank, for example because its folder was deleted. Raised on all ranks."""


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

    def fill(self, tensors: Iterable[Tensor]) -> dict[str, Any]:
        """Write header and tensors; return their size and checksum when all bytes are copied."""
        offset = len(self._header)
        self._bytes[:offset].copy_(torch.frombuffer(bytearray(self._header), dtype=torch.uint8))
        sums = _WordSums()
        for entry, tensor in zip(self.entries, tensors, strict=True):
            assert tensor.shape == (entry.length,) and tensor.dtype == entry.dtype, entry
            for part in tensor.detach().contiguous().split(SUMMED_BYTES // entry.dtype.itemsize):
                sums.add(part)
                target = self._bytes[offset : offset + part.nbytes]
                target.copy_(part.view(torch.uint8), non_blocking=True)  # blocks unless a GPU copies into pinned memory
                offset += part.nbytes
        if self._is_pinned:
            torch.cuda.current_stream().synchronize()
        return state_file_entry([header_sum(self._header), *sums.on_host()])

    def close(self) -> None:
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._is_pinned = False


@dataclass(frozen=True)
class _Part:
    """The files that one rank has copied to its node's memory."""

    first_rank_here: int
    """First rank of the node."""
    files: dict[str, dict[str, Any]]
    """Sizes and checksums, by path in the snapshot."""
    problem: str | None = None
    """Why it could not copy them."""


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

    def take(self, plan: SavePlan, busy: int | None) -> tuple[int, dict[str, dict[str, Any]]]:
        """Copy the state to a slot other than `busy`, which is being read. Return its number, and size and checksum of
        each file of this rank. Collective."""
        self._wait_until_prepared()
        # Overwrites the older slot. If one is being read, it is complete, so the other may go even if it is newer.
        slot = min((slot for slot in range(SLOTS) if slot != busy), key=lambda slot: self._folder.step_in(slot) or 0)
        part = self._copy(plan, slot)
        # Slots are complete, and chosen for the next time, only when all ranks have copied their part.
        parts, problem = gathered(part), None
        if self._world.local_rank == 0 and not any(one.problem for one in parts):
            here = [one.files for one in parts if one.first_rank_here == self._world.rank]
            files = {name: entry for of_rank in here for name, entry in of_rank.items()}
            try:
                self._folder.finish(slot, plan.step, files, self._world.rank, len(here))
            except OSError as error:
                problem = f"rank {self._world.rank}: {error}"
        if first := next(filter(None, [*(one.problem for one in parts), *gathered(problem)]), None):
            raise SnapshotLost(f"snapshot of step {plan.step}", first, "Set checkpoint.background=never.")
        return slot, part.files

    def _copy(self, plan: SavePlan, slot: int) -> _Part:
        """Copy this rank's files to the slot; the first rank of a node also writes the common ones."""
        first_rank_here = self._world.rank - self._world.local_rank
        contents = plan.own | (plan.common if self._world.local_rank == 0 else {})
        try:
            path = self._folder.begin(slot)
            files = {plan.state.name: self._mapped(slot, plan.state.entries).fill(plan.state.tensors())}
            for name, content in contents.items():
                (path / name).unlink(missing_ok=True)  # opening a FIFO would wait for a reader
                files[name] = write_file(path / name, content)
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            return _Part(first_rank_here, {}, f"rank {self._world.rank}: {error}")
        return _Part(first_rank_here, files)

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
        mapped, path = self._files.get(slot), self._path(slot)
        if mapped is None or mapped.entries != entries or not _has_right_size(path, entries):  # it may be deleted
            if mapped:
                mapped.close()
            self._files[slot] = MappedStateFile(path, entries, self._device)
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
