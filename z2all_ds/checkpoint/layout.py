"""Names and health of checkpoints: temporary folder -> fsync -> rename -> MANIFEST.json last.

checkpoints/step_00001000/
    state/              weights, optimizer: a file a rank and an index (state_files.py)
    data_state.json     where the data stream stands
    trainer.json        step, shape (ranks, ZeRO stage, dtype), tokens seen
    rng_rank_0000.pt    random generators, one file a rank
    MANIFEST.json       sizes and checksums of all of the above; without it the folder does not count
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
"""Key of the master weights in the index, beside the optimizer's names of its states."""
TEMPORARY_PREFIX = ".tmp_"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, on a disk or in memory."""

    path: Path
    step: int

    @property
    def name(self) -> str:
        """As it is told to people."""
        return step_name(self.step) + (" in memory" if self.is_in_memory else "")

    @property
    def is_in_memory(self) -> bool:
        """One on a disk has the step in its folder's name."""
        return not is_step_name(self.path.name)

    @property
    def trainer(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.path / TRAINER).read_text(encoding="utf-8"))
        return content

    @property
    def data_state(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.path / DATA_STATE).read_text(encoding="utf-8"))
        return content


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def temporary_path(checkpoints: Path, step: int, attempt: str = "") -> Path:
    """`attempt` keeps what an earlier one of the same step has left apart from this one."""
    return checkpoints / f"{TEMPORARY_PREFIX}{step_name(step)}{attempt and '_'}{attempt}"


def seal(checkpoints: Path, step: int, entries: dict[str, dict[str, Any]], attempt: str = "") -> Path:
    """Makes a temporary folder the checkpoint of `step`. One process calls it, when all files are on the disk.

    `entries` has size and checksum of each file.
    """
    temporary, final = temporary_path(checkpoints, step, attempt), checkpoints / step_name(step)
    for folder in {(temporary / name).parent for name in entries} | {temporary}:
        force_to_disk(folder)
    if final.exists():
        # Only an unsealed or damaged folder of this step can be here: a run would have resumed from a healthy one.
        shutil.rmtree(final)
    temporary.replace(final)
    force_to_disk(checkpoints)
    content = {"step": step, "checksum_block_bytes": BLOCK_BYTES, "files": dict(sorted(entries.items()))}
    write_whole(final / MANIFEST, json.dumps(content, indent=1))
    return final


def why_damaged(path: Path, verify_checksums: bool) -> str | None:
    """None for a healthy checkpoint, else what is wrong with it."""
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


def all_of(checkpoints: Path) -> list[Path]:
    """Folders of steps, whole or not, the oldest first."""
    folders = [path for path in checkpoints.glob("step_*") if path.is_dir() and is_step_name(path.name)]
    return sorted(folders, key=step_of)


def sealed(checkpoints: Path) -> list[Path]:
    """Those that were finished, whole or not."""
    return [path for path in all_of(checkpoints) if (path / MANIFEST).exists()]


def newest_step(checkpoints: Path) -> int:
    """Of those that were finished; 0 where there is none."""
    return max(map(step_of, sealed(checkpoints)), default=0)


def find_latest(checkpoints: Path, verify_checksums: bool = True) -> tuple[Checkpoint | None, list[str]]:
    """The newest healthy checkpoint and a line for each damaged one passed over.

    Where steps were saved but none is healthy, that is an error: starting again at step 0 must be somebody's decision.
    """
    skipped: list[str] = []
    for path in reversed(all_of(checkpoints)):
        problem = why_damaged(path, verify_checksums)
        if problem is None:
            return Checkpoint(path, step_of(path)), skipped
        skipped.append(f"checkpoint {path.name} skipped: {problem}")
    if finished := sealed(checkpoints):
        raise CheckpointError(
            f"{checkpoints}",
            f"none of {len(finished)} checkpoints can be loaded ({skipped[0]})",
            "Restore one from a copy, or use another run_dir to start anew.",
        )
    return None, skipped


def open_checkpoint(path: Path, verify_checksums: bool = True) -> Checkpoint:
    """A checkpoint asked for by path: it is healthy or it is an error."""
    problem = why_damaged(path, verify_checksums) if path.is_dir() else "no such folder"
    if problem or not is_step_name(path.name):
        raise CheckpointError(
            f"checkpoint {path}", problem or "not a step_NNNNNNNN folder", "Give a complete checkpoint."
        )
    return Checkpoint(path, step_of(path))


def refuse_to_fall_behind(checkpoints: Path, step: int) -> None:
    """A start from `step` by hand must not stand beside later checkpoints, which the next `auto` would take up."""
    if (newest := newest_step(checkpoints)) > step:
        raise CheckpointError(
            f"start from step {step}",
            f"{checkpoints} has later ones ({step_name(newest)})",
            "Set another run_dir, or --resume auto.",
        )


def leftovers(checkpoints: Path) -> list[Path]:
    """What saves and deletions that were cut off have left: temporary folders, and steps without a manifest."""
    unsealed = set(all_of(checkpoints)) - set(sealed(checkpoints))
    return sorted([*checkpoints.glob(f"{TEMPORARY_PREFIX}*"), *unsealed])


def remove_leftovers(checkpoints: Path) -> list[str]:
    """Deletes them, as far as the file system allows, and returns their names."""
    found = leftovers(checkpoints)
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in found]


def size_of(path: Path) -> int:
    """Returns the bytes of all files in a folder, which a job may be deleting at the same time."""
    total = 0
    for file in path.rglob("*"):
        with suppress(FileNotFoundError):
            total += file.lstat().st_size if file.is_file() else 0
    return total


def is_step_name(name: str) -> bool:
    return bool(re.fullmatch(r"step_\d+", name))


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))
