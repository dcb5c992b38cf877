"""Folders of checkpoints: names, sealing (temporary folder, sync, rename, manifest last) and damage.

checkpoints/step_00001000/
    state/              weights and optimizer: a file per rank and an index (state_files.py)
    data_state.json     position of the data stream
    trainer.json        step, shape (ranks, ZeRO stage, dtype), tokens seen
    rng_rank_0000.pt    random generators, one file per rank
    MANIFEST.json       sizes and checksums of all of the above; without it the folder is not a checkpoint
"""

import json
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from z2all_ds.base.atomic import force_to_disk, write_whole
from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint.disk_file import BLOCK_BYTES, file_checksum, hashing_threads

MANIFEST = "MANIFEST.json"
STATE_FOLDER = "state"
STATE_INDEX = "index.json"
TRAINER = "trainer.json"
DATA_STATE = "data_state.json"
WEIGHT = "weight"
"""Key of the master weights in the index; the other keys are the optimizer's names of its states."""
TEMPORARY_PREFIX = ".tmp_"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, on disk or in memory."""

    path: Path
    step: int

    @property
    def name(self) -> str:
        return step_name(self.step) + (" in memory" if self.is_in_memory else "")

    @property
    def is_in_memory(self) -> bool:
        """Only folders on disk have the step in their name."""
        return not is_step_name(self.path.name)

    @property
    def trainer(self) -> dict[str, Any]:
        return self._read(TRAINER)

    @property
    def data_state(self) -> dict[str, Any]:
        return self._read(DATA_STATE)

    def _read(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        return content


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def temporary_path(checkpoints: Path, step: int, attempt: str = "") -> Path:
    """Return the folder to write to; `attempt` tells apart several attempts to save the same step."""
    return checkpoints / f"{TEMPORARY_PREFIX}{step_name(step)}{attempt and '_'}{attempt}"


def seal(checkpoints: Path, step: int, entries: dict[str, dict[str, Any]], attempt: str = "") -> Path:
    """Turn a temporary folder into the checkpoint of `step`; called by one process when all files are on disk.

    `entries` has size and checksum of each file.
    """
    temporary, final = temporary_path(checkpoints, step, attempt), checkpoints / step_name(step)
    for folder in {(temporary / name).parent for name in entries} | {temporary}:
        force_to_disk(folder)
    if final.exists():
        # It is unsealed or damaged: from an intact checkpoint of this step the run would have resumed.
        shutil.rmtree(final)
    temporary.replace(final)
    force_to_disk(checkpoints)
    content = {"step": step, "checksum_block_bytes": BLOCK_BYTES, "files": dict(sorted(entries.items()))}
    write_whole(final / MANIFEST, json.dumps(content, indent=1))
    return final


def why_damaged(path: Path, verify_checksums: bool) -> str | None:
    """Return the first damage that is found, None for an intact checkpoint."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        return f"no {MANIFEST}: it was never finished"
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        entries = [(name, entry["bytes"], entry["checksum"]) for name, entry in files.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is not readable ({type(error).__name__})"
    for name, size, _ in entries:
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    if verify_checksums:
        with hashing_threads() as threads:
            for name, _, checksum in entries:
                if file_checksum(path / name, threads) != checksum:
                    return f"{name} does not match its checksum"
    return None


def step_folders(checkpoints: Path) -> list[Path]:
    """Return the folders of all steps, sealed or not, oldest first."""
    folders = [path for path in checkpoints.glob("step_*") if path.is_dir() and is_step_name(path.name)]
    return sorted(folders, key=step_of)


def sealed_folders(checkpoints: Path) -> list[Path]:
    """Return the folders with a manifest, damaged or not, oldest first."""
    return [path for path in step_folders(checkpoints) if (path / MANIFEST).exists()]


def newest_step(checkpoints: Path) -> int:
    """Return the step of the newest sealed folder, 0 if there is none."""
    return max(map(step_of, sealed_folders(checkpoints)), default=0)


def find_latest(checkpoints: Path, verify_checksums: bool = True) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint and a line for each damaged one that was skipped.

    Raise if checkpoints exist but all are damaged: restarting at step 0 must be the user's decision.
    """
    skipped: list[str] = []
    for path in reversed(step_folders(checkpoints)):
        problem = why_damaged(path, verify_checksums)
        if problem is None:
            return Checkpoint(path, step_of(path)), skipped
        skipped.append(f"checkpoint {path.name} skipped: {problem}")
    if found := sealed_folders(checkpoints):
        raise CheckpointError(
            f"{checkpoints}",
            f"none of {len(found)} checkpoints can be loaded ({skipped[0]})",
            "Restore one from a copy, or set another run_dir to start over.",
        )
    return None, skipped


def open_checkpoint(path: Path, verify_checksums: bool = True) -> Checkpoint:
    """Return the checkpoint in a folder. Raise if it is damaged."""
    problem = why_damaged(path, verify_checksums) if path.is_dir() else "no such folder"
    if problem or not is_step_name(path.name):
        raise CheckpointError(
            f"checkpoint {path}", problem or "not a step_NNNNNNNN folder", "Give a complete checkpoint."
        )
    return Checkpoint(path, step_of(path))


def require_no_later(checkpoints: Path, step: int) -> None:
    """Refuse to start from `step` if there are later checkpoints, from which the next `--resume auto` would resume."""
    if (newest := newest_step(checkpoints)) > step:
        raise CheckpointError(
            f"start from step {step}",
            f"{checkpoints} has later checkpoints ({step_name(newest)})",
            "Set another run_dir, or use --resume auto.",
        )


def leftovers(checkpoints: Path) -> list[Path]:
    """Return the remains of interrupted saves and deletions: temporary folders, and steps without a manifest."""
    unsealed = set(step_folders(checkpoints)) - set(sealed_folders(checkpoints))
    return sorted([*checkpoints.glob(f"{TEMPORARY_PREFIX}*"), *unsealed])


def remove_leftovers(checkpoints: Path) -> list[str]:
    """Delete the leftovers, as far as the file system permits, and return their names."""
    found = leftovers(checkpoints)
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in found]


def folder_bytes(path: Path) -> int:
    """Return the size of all files in a folder, which another process may be deleting."""
    total = 0
    for file in path.rglob("*"):
        with suppress(FileNotFoundError):
            total += file.lstat().st_size if file.is_file() else 0
    return total


def is_step_name(name: str) -> bool:
    return bool(re.fullmatch(r"step_\d+", name))


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))
