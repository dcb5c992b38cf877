"""Where snapshots lie in this machine's shared memory, so that they outlive the processes that made them.

/dev/shm/z2all_UID_LINEAGE/
    run_dir             whose they are
    slot_0/  slot_1/    files of a checkpoint (layout.py), those of this node's ranks; READY instead of a manifest

A slot is written over only while the other is whole. LINEAGE names one unbroken line of steps: a run that goes on from
a snapshot keeps it, one that goes on from the disk begins another, and snapshots of the old line, which may know of
steps that never happened in the new one, are never looked at again. Loads no torch.
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
from z2all_ds.checkpoint.layout import STATE_FOLDER, Checkpoint, size_of

SHARED_MEMORY = Path("/dev/shm")
SLOTS = 2
MOST_OF_MEMORY = 0.5
"""Of what is available: training itself and the disk's cache want the rest."""
_READY, _RUN_DIR = "READY", "run_dir"


@dataclass(frozen=True)
class SnapshotFolder:
    """This node's snapshots of one line of steps."""

    lineage: str

    @property
    def path(self) -> Path:
        return SHARED_MEMORY / f"{_prefix()}{self.lineage}"

    def slot(self, number: int) -> Path:
        return self.path / f"slot_{number}"

    def create(self, run_dir: Path) -> None:
        """May be called by several ranks at once. Weights are not for everybody on the machine to read."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        for number in range(SLOTS):
            (self.slot(number) / STATE_FOLDER).mkdir(parents=True, exist_ok=True)
        (self.path / _RUN_DIR).write_text(str(run_dir), encoding="utf-8")

    def snapshots(self) -> list[Checkpoint]:
        """Whole ones, the newest first."""
        found = [Checkpoint(self.slot(number), step) for number in range(SLOTS) if (step := self.step_in(number))]
        return sorted(found, key=lambda snapshot: -snapshot.step)

    def step_in(self, number: int) -> int | None:
        """None for a slot that is empty or was being written when its writer ended."""
        try:
            step: int = json.loads((self.slot(number) / _READY).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return step

    def begin(self, number: int) -> Path:
        """From here on the slot holds nothing."""
        (self.slot(number) / _READY).unlink(missing_ok=True)
        return self.slot(number)

    def finish(self, number: int, step: int) -> None:
        temporary = self.slot(number) / f".{_READY}"
        temporary.write_text(json.dumps(step), encoding="utf-8")
        temporary.replace(self.slot(number) / _READY)

    @property
    def size_bytes(self) -> int:
        """Memory that it has already."""
        return size_of(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def new_lineage() -> str:
    return uuid.uuid4().hex[:16]


def line_of(folder: RunFolder) -> SnapshotFolder | None:
    """Where the snapshots would be that the run may go on from; this machine need not have any."""
    try:
        lineage = folder.lineage.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return SnapshotFolder(lineage) if re.fullmatch(r"[0-9a-f]+", lineage) else None


def all_here() -> dict[SnapshotFolder, Path]:
    """This user's on this machine -> the run's folder. What cannot be read is nobody's."""
    found = {}
    for path in SHARED_MEMORY.glob(f"{_prefix()}*"):
        with suppress(OSError, UnicodeDecodeError):
            run_dir = (path / _RUN_DIR).read_text(encoding="utf-8")
            found[SnapshotFolder(path.name.removeprefix(_prefix()))] = Path(run_dir)
    return found


def remove_all_of(folder: RunFolder, but: SnapshotFolder | None = None) -> None:
    """What earlier lines of the run have left on this machine."""
    for line, run_dir in all_here().items():
        if run_dir == folder.root and line != but:
            line.remove()


def why_no_room(bytes_needed: int) -> str | None:
    """Why this machine cannot hold so much in shared memory; None where it can."""
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    if free < bytes_needed:
        return f"{SHARED_MEMORY} has {free / 1e9:.2f} GB free (in docker: --shm-size, or --ipc=host)"
    usable = int(available_bytes() * MOST_OF_MEMORY)
    if usable < bytes_needed:
        return f"{MOST_OF_MEMORY:.0%} of the memory available is {usable / 1e9:.2f} GB"
    return None


def _prefix() -> str:
    return f"z2all_{os.getuid()}_"
