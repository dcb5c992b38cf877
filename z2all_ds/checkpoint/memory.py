"""Folders of snapshots in this machine's shared memory, where they outlive the processes that wrote them.

/dev/shm/z2all_UID_LINEAGE/
    run_dir             path of the run folder
    run_id              device and inode of its parent folder and of itself
    lock_RANK           locked by the run that uses the folder
    slot_0/  slot_1/    files of a checkpoint (layout.py) of this node's ranks; READY_RANK instead of a manifest: the
                        step, the node's ranks, sizes and checksums (snapshot_check.py)

RANK is the first rank of a node: several containers on one host may share this memory. A slot is overwritten only while
the other one is complete.

A lineage is an uninterrupted sequence of steps: a run that resumes from a snapshot keeps it, a run that resumes from
disk starts a new one. Snapshots of other lineages are never read, because they may contain steps that the current one
does not have. Does not load torch.
"""

import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from z2all_ds.base.atomic import write_whole
from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.json_text import load_json
from z2all_ds.base.process_memory import available_bytes
from z2all_ds.base.run_folder import RunFolder, file_id, wait_for_lock
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.checkpoint.layout import (
    REQUIRED,
    STATE_FOLDER,
    TRAINER,
    Checkpoint,
    folder_bytes,
    newest_step,
    rng_name,
    state_file_name,
)
from z2all_ds.checkpoint.snapshot_check import why_files_damaged

SHARED_MEMORY = Path("/dev/shm")
SLOTS = 2
MAX_MEMORY_SHARE = 0.5
"""Largest share of the available memory for snapshots; training itself and the page cache need the rest."""
REMOVE_PATIENCE_SECONDS = 5.0
"""The processes of a run that is being ended hold their lock for a moment."""
_READY, _LOCK, _RUN_DIR, _RUN_ID = "READY", "lock", "run_dir", "run_id"


@dataclass(frozen=True)
class SnapshotFolder:
    """This node's snapshots of one lineage."""

    lineage: str

    @property
    def path(self) -> Path:
        return SHARED_MEMORY / f"{_prefix()}{self.lineage}"

    @property
    def is_ours(self) -> bool:
        """Whether it is a folder that only this user can have written to."""
        try:
            found = self.path.lstat()
        except OSError:
            return False
        is_private = found.st_uid == os.getuid() and not found.st_mode & 0o077
        return stat.S_ISDIR(found.st_mode) and is_private

    def slot(self, number: int) -> Path:
        return self.path / f"slot_{number}"

    def create(self, run_dir: Path) -> None:
        """Create the folder, readable only by this user; several ranks may call this at once."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        if not self.is_ours:
            raise CheckpointError(f"{self.path}", "belongs to another user", "Set checkpoint.background=never.")
        for number in range(SLOTS):
            (self.slot(number) / STATE_FOLDER).mkdir(parents=True, exist_ok=True)
        for name, content in {_RUN_DIR: str(run_dir), _RUN_ID: json.dumps(_run_id(run_dir))}.items():
            write_whole(self.path / name, content, mode=0o600, temporary=self.path / f".{uuid.uuid4().hex}")

    def snapshots(self) -> list[Checkpoint]:
        """Return the complete snapshots, newest first."""
        numbers = range(SLOTS) if self.is_ours else ()
        found = [Checkpoint(self.slot(number), step) for number in numbers if (step := self.step_in(number))]
        return sorted(found, key=lambda snapshot: -snapshot.step)

    def step_in(self, number: int) -> int | None:
        """Return the step of a slot, None if the slot is empty or incomplete."""
        found = _ready(self.slot(number))
        return found[0] if found else None

    def begin(self, number: int) -> Path:
        """Mark a slot as incomplete and return its folder."""
        for ready in self.slot(number).glob(f"{_READY}_*"):
            ready.unlink(missing_ok=True)
        return self.slot(number)

    def finish(self, number: int, step: int, files: Mapping[str, Any], first_rank: int = 0, ranks: int = 1) -> None:
        """Mark a slot as complete. `files`: size and checksum of each file of a node's ranks, of which there are
        `ranks` from `first_rank` on."""
        ready = self.slot(number) / f"{_READY}_{first_rank:05d}"
        content = {"step": step, "ranks": list(range(first_rank, first_rank + ranks)), "files": files}
        write_whole(ready, json.dumps(content), temporary=ready.with_name(f".{ready.name}"))

    def lock(self, first_rank: int = 0, patience_seconds: float = 0.0) -> int | None:
        """Lock the snapshots of a node until the returned descriptor is closed or the process ends. Return None if
        another process holds the lock for longer than this, or if there is no folder."""
        return _locked(self.path / f"{_LOCK}_{first_rank:05d}", patience_seconds)

    @property
    def is_in_use(self) -> bool:
        """Whether a process holds a lock."""
        with self._all_locked(0.0) as is_locked:
            return not is_locked

    @property
    def size_bytes(self) -> int:
        return folder_bytes(self.path)

    def remove(self) -> int:
        """Remove the folder, unless it belongs to another user or a running process holds a lock. Return the bytes that
        this frees."""
        if self.is_ours:
            with self._all_locked(REMOVE_PATIENCE_SECONDS) as is_locked:
                if is_locked:
                    size_bytes = self.size_bytes
                    shutil.rmtree(self.path, ignore_errors=True)
                    return size_bytes - self.size_bytes
        return 0

    def is_of(self, run_dir: Path) -> bool:
        """Whether it belongs to this run folder: another container may have another one at the same path. True if
        the snapshots do not say so."""
        try:
            return bool(load_json(read_regular(self.path / _RUN_ID)) == _run_id(run_dir))
        except (OSError, ValueError):
            return True

    def is_abandoned(self, run_dir: Path, without_parent: bool) -> bool:
        """Whether the run folder was moved or deleted.

        If the folder around it is another one than recorded, its disk may not be mounted, or it is that of another
        container. With `without_parent`, it may also be missing.
        """
        try:
            parent, root = load_json(read_regular(self.path / _RUN_ID))
            is_mount_point = parent[0] != root[0]
            parent_now, root_now = _run_id(run_dir)
        except (OSError, ValueError, LookupError, TypeError):  # also: not known, or from an earlier version
            return False
        is_gone = root_now != root and (parent_now == parent or (without_parent and parent_now is None))
        return is_gone and not is_mount_point

    @contextmanager
    def _all_locked(self, patience_seconds: float) -> Iterator[bool]:
        """Lock the snapshots of all nodes, and yield whether no other process holds a lock."""
        with ExitStack() as stack:
            for path in sorted(self.path.glob(f"{_LOCK}_*")):  # in the same order in all processes
                if (lock := _locked(path, patience_seconds)) is None:
                    yield False
                    return
                stack.callback(os.close, lock)
            yield True


def _locked(path: Path, patience_seconds: float) -> int | None:
    """Return a descriptor of the locked file, None if another process holds the lock or there is no folder."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    if wait_for_lock(descriptor, patience_seconds):
        return descriptor
    os.close(descriptor)
    return None


def _run_id(run_dir: Path) -> list[list[int] | None]:
    """Return device and inode of the folder around a run folder and of itself; None for one that does not exist."""
    return [file_id(run_dir.parent), file_id(run_dir)]


def new_lineage() -> str:
    return uuid.uuid4().hex[:16]


def snapshot_folder(folder: RunFolder) -> SnapshotFolder | None:
    """Return the folder of the snapshots that the run may resume from; it may not exist on this machine.

    None for a copy of a run folder: the snapshots belong to the original, which may be running. None if the folder was
    emptied, or its newest checkpoint was removed: the user wants to start over or to go back.
    """
    try:
        lineage, owner = read_regular(folder.lineage).decode("utf-8").split("\n", 1)
        is_valid = re.fullmatch(r"[0-9a-f]+", lineage) and owner == _identity(folder)
    except (OSError, ValueError):
        return None
    newest_saved = max(folder.data_state_files(), default=0)  # kept when a checkpoint is deleted
    is_valid = is_valid and newest_saved <= newest_step(folder.checkpoints)
    return SnapshotFolder(lineage) if is_valid else None


def write_lineage(folder: RunFolder, snapshots: SnapshotFolder) -> None:
    """Name the snapshots that the run may resume from."""
    folder.events.touch()
    write_whole(folder.lineage, f"{snapshots.lineage}\n{_identity(folder)}", mode=0o600)


def _identity(folder: RunFolder) -> str:
    """Return path and inodes: a copy has other inodes, a folder that was moved here another path. The events are lost
    with the files of the run, unlike the hidden file of the lineage. Raise FileNotFoundError without them."""
    return f"{folder.root.resolve()}\n{folder.root.stat().st_ino} {folder.events.stat().st_ino}"


def files_of(snapshot: Checkpoint) -> dict[str, Any]:
    """Return size and checksum of each file of a snapshot; empty if it is no longer complete."""
    step, files, _ = _ready(snapshot.path) or (None, {}, ())
    return files if step == snapshot.step else {}


def why_damaged(snapshot: Checkpoint, verify_checksums: bool, part: int = 0, parts: int = 1) -> str | None:
    """Return the first damage that is found in a snapshot, None if it is intact. The ranks of a node may divide the
    files: each verifies every `parts`-th one."""
    step, files, ranks = _ready(snapshot.path) or (None, {}, ())
    if step != snapshot.step:
        return "it is no longer complete"
    try:
        of_ranks = [(f"{STATE_FOLDER}/{state_file_name(rank)}", rng_name(f"{rank:04d}")) for rank in ranks]
        if missing := [name for name in (*REQUIRED, *chain.from_iterable(of_ranks)) if name not in files]:
            return f"{_READY} does not list {missing[0]}"
        mine = {name: files[name] for name in sorted(files)[part::parts]}
        problem = why_files_damaged(snapshot.path, mine, verify_checksums)
        if problem is None and snapshot.trainer.get("step") != snapshot.step:
            problem = f"{TRAINER} is of step {snapshot.trainer.get('step')}"
    except CheckpointError as error:
        return error.rule
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"{_READY} is not readable ({type(error).__name__})"
    return problem


def _ready(slot: Path) -> tuple[int, dict[str, Any], Collection[int]] | None:
    """Return step, files and ranks of a complete slot."""
    steps: set[Any] = set()
    files: dict[str, Any] = {}
    ranks: list[int] = []
    try:
        for ready in slot.glob(f"{_READY}_*"):
            content = load_json(read_regular(ready))
            steps.add(content["step"])
            files.update(content["files"])
            ranks += content["ranks"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    step = steps.pop() if len(steps) == 1 else None
    return (step, files, ranks) if type(step) is int else None


def all_snapshot_folders() -> dict[SnapshotFolder, Path]:
    """Return the run folder of each of this user's snapshot folders on this machine."""
    found = {}
    for path in SHARED_MEMORY.glob(f"{_prefix()}*"):
        snapshots = SnapshotFolder(path.name.removeprefix(_prefix()))
        with suppress(OSError, UnicodeDecodeError):
            if snapshots.is_ours:
                found[snapshots] = Path(read_regular(path / _RUN_DIR).decode("utf-8"))
    return found


def remove_snapshots(folder: RunFolder, but: SnapshotFolder | None = None) -> None:
    """Remove all snapshots of a run from this machine, except those of one lineage."""
    for found, run_dir in all_snapshot_folders().items():
        if run_dir == folder.root and found != but and found.is_of(run_dir):
            found.remove()


def unneeded_snapshots(pruned: RunFolder | None = None) -> list[SnapshotFolder]:
    """Return the snapshots that no process uses and whose run folder was moved or deleted; for `prune --memory` also
    those of its run."""
    found = {
        snapshots: (pruned and run_dir == pruned.root and snapshots.is_of(run_dir))
        or snapshots.is_abandoned(run_dir, pruned is not None)
        for snapshots, run_dir in all_snapshot_folders().items()
    }
    return [snapshots for snapshots, is_unneeded in found.items() if is_unneeded and not snapshots.is_in_use]


def end_lineage(folder: RunFolder) -> None:
    """Make the run resume from disk: its snapshots, also those on other machines, do not lead to the checkpoint that
    was put there."""
    folder.lineage.unlink(missing_ok=True)
    remove_snapshots(folder)


def why_no_room(bytes_needed: int) -> str | None:
    """Return why this many bytes do not fit in shared memory, None if they do."""
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    if free < bytes_needed:
        return f"{SHARED_MEMORY} has {free / 1e9:.2f} GB free (in docker: --shm-size, or --ipc=host)"
    usable = int(available_bytes() * MAX_MEMORY_SHARE)
    if usable < bytes_needed:
        return f"{MAX_MEMORY_SHARE:.0%} of the available memory is {usable / 1e9:.2f} GB"
    return None


def _prefix() -> str:
    return f"z2all_{os.getuid()}_"
