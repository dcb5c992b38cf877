"""Snapshots: the whole state of a run, copied into this machine's shared memory in the time of that copy.

A snapshot has the files of a checkpoint, so it is read like one: a run goes back to it without touching a disk, and a
run that was killed goes on from it on the same machines.
"""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.world import World
from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.mapped_file import MappedStateFile, has_room
from z2all_ds.checkpoint.memory import SLOTS, SnapshotFolder, why_no_room
from z2all_ds.checkpoint.rng import rng_name, rng_state
from z2all_ds.checkpoint.state_files import Entry, file_name
from z2all_ds.zero.collective import gathered
from z2all_ds.zero.state.engine_state import entries_to_write, write_index, write_state


class Snapshots:
    """One rank's part of them. Methods are collective, but for `prepare` and `close`."""

    def __init__(self, folder: SnapshotFolder, run_dir: Path, world: World, device: torch.device) -> None:
        self._folder, self._world, self._device = folder, world, device
        self._files: dict[int, MappedStateFile] = {}
        self._preparing: threading.Thread | None = None
        folder.create(run_dir)

    def prepare(self, engine: Any) -> None:
        """Makes the memory ready beside the next steps: seconds, for tens of gigabytes that are to be pinned."""
        entries = entries_to_write(engine)

        def map_all() -> None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            for number in range(SLOTS):
                # A whole snapshot of another shape is left alone until its turn to be written over comes.
                if self._folder.step_in(number) is None or has_room(self._path(number), entries):
                    self._mapped(number, entries)

        self._preparing = threading.Thread(target=map_all, name="preparing-snapshots", daemon=True)
        self._preparing.start()

    def take(self, engine: Any, step: int, files: dict[str, str], busy: int | None) -> tuple[int, list[str]]:
        """Returns the slot it is in, and what this rank has written there.

        `files` are those that are the same on all ranks, with their content; `busy` is a slot that is being read.
        """
        if self._preparing:
            self._preparing.join()
            self._preparing = None
        number = self._next(busy)
        slot = self._folder.begin(number)

        def write_file(path: Path, entries: list[Entry], tensors: Iterable[Tensor]) -> None:
            self._mapped(number, entries).fill(tensors)

        written, problem = None, None
        try:
            written = write_state(engine, slot, write_file)
            torch.save(rng_state(), slot / rng_name(f"{self._world.rank:04d}"))
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            problem = f"rank {self._world.rank}: {error}"
        of_ranks = gathered((written, problem))
        for _, problem in of_ranks:
            if problem:
                raise CheckpointError(f"snapshot of step {step}", problem, "Set checkpoint.background=never.")
        assert written
        if self._world.local_rank == 0:
            write_index(engine, slot, [of_rank for of_rank, _ in of_ranks if of_rank])
            for name, content in files.items():
                (slot / name).write_text(content, encoding="utf-8")
            self._folder.finish(number, step)
        return number, [*written.files, rng_name(f"{self._world.rank:04d}")]

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
    sizes = gathered((first_rank_here, sum(entry.num_bytes for entry in entries_to_write(engine))))
    needed = SLOTS * sum(size for first_rank, size in sizes if first_rank == first_rank_here)
    no_room = why_no_room(max(0, needed - folder.size_bytes))
    reason = f"{SLOTS} snapshots take {needed / 1e9:.2f} GB of a machine's memory, and {no_room}" if no_room else None
    return next(filter(None, gathered(reason)), None)
