"""Folders of snapshots in this machine's shared memory, where they outlive the processes that wrote them.

/dev/shm/z2all_UID_LINEAGE/
    run_dir             path of the run folder
    slot_0/  slot_1/    files of a checkpoint (layout.py) of this node's ranks; READY instead of a manifest

A slot is overwritten only while the other one is complete. A lineage is an uninterrupted sequence of steps: a run that
resumes from a snapshot keeps it, a run that resumes from disk starts a new one. Snapshots of other lineages are never
read, because they may contain steps that the current one does not have. Does not load torch.
"""

import json
import os
import re
import shutil
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.process_memory import available_bytes
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint.layout import STATE_FOLDER, Checkpoint, folder_bytes

SHARED_MEMORY = Path("/dev/shm")
SLOTS = 2
MAX_MEMORY_SHARE = 0.5
"""Largest share of the available memory for snapshots; training itself and the page cache need the rest."""
_READY, _RUN_DIR = "READY", "run_dir"


@dataclass(frozen=True)
class SnapshotFolder:
    """This node's snapshots of one lineage."""

    lineage: str

    @property
    def path(self) -> Path:
        return SHARED_MEMORY / f"{_prefix()}{self.lineage}"

    def slot(self, number: int) -> Path:
        return self.path / f"slot_{number}"

    def create(self, run_dir: Path) -> None:
        """Create the folder, readable only by this user; several ranks may call this at once."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        for number in range(SLOTS):
            (self.slot(number) / STATE_FOLDER).mkdir(parents=True, exist_ok=True)
        (self.path / _RUN_DIR).write_text(str(run_dir), encoding="utf-8")

    def snapshots(self) -> list[Checkpoint]:
        """Return the complete snapshots, newest first."""
        found = [Checkpoint(self.slot(number), step) for number in range(SLOTS) if (step := self.step_in(number))]
        return sorted(found, key=lambda snapshot: -snapshot.step)

    def step_in(self, number: int) -> int | None:
        """Return the step of a slot, None if the slot is empty or incomplete."""
        try:
            step: int = json.loads((self.slot(number) / _READY).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return step

    def begin(self, number: int) -> Path:
        """Mark a slot as incomplete and return its folder."""
        (self.slot(number) / _READY).unlink(missing_ok=True)
        return self.slot(number)

    def finish(self, number: int, step: int) -> None:
        """Mark a slot as complete."""
        temporary = self.slot(number) / f".{_READY}"
        temporary.write_text(json.dumps(step), encoding="utf-8")
        temporary.replace(self.slot(number) / _READY)

    @property
    def size_bytes(self) -> int:
        return folder_bytes(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def new_lineage() -> str:
    return uuid.uuid4().hex[:16]


def snapshot_folder(folder: RunFolder) -> SnapshotFolder | None:
    """Return the folder of the snapshots that the run may resume from; it may not exist on this machine."""
    try:
        lineage = folder.lineage.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return SnapshotFolder(lineage) if re.fullmatch(r"[0-9a-f]+", lineage) else None


def all_snapshot_folders() -> dict[SnapshotFolder, Path]:
    """Return the run folder of each of this user's snapshot folders on this machine."""
    found = {}
    for path in SHARED_MEMORY.glob(f"{_prefix()}*"):
        with suppress(OSError, UnicodeDecodeError):
            run_dir = (path / _RUN_DIR).read_text(encoding="utf-8")
            found[SnapshotFolder(path.name.removeprefix(_prefix()))] = Path(run_dir)
    return found


def remove_snapshots(folder: RunFolder, but: SnapshotFolder | None = None) -> None:
    """Remove all snapshots of a run from this machine, except those of one lineage."""
    for found, run_dir in all_snapshot_folders().items():
        if run_dir == folder.root and found != but:
            found.remove()


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
