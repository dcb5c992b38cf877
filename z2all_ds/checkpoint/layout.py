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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from z2all_ds.base.atomic import force_to_disk, write_whole
from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.json_text import load_json
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.checkpoint.disk_file import BLOCK_BYTES, file_checksum, hashing_threads

MANIFEST = "MANIFEST.json"
STATE_FOLDER = "state"
STATE_INDEX = "index.json"
TRAINER = "trainer.json"
DATA_STATE = "data_state.json"
WEIGHT = "weight"
"""Key of the master weights in the index; the other keys are the optimizer's names of its states."""
TEMPORARY_PREFIX = ".tmp_"
FIX_DAMAGED = "Use another checkpoint, or restore this one from a copy."
REQUIRED = (TRAINER, DATA_STATE, f"{STATE_FOLDER}/{STATE_INDEX}")
OUR_FILES = re.compile(
    rf"(?:MANIFEST\.json|{TRAINER}|{DATA_STATE}|rng_rank_\d+\.pt"
    rf"|{STATE_FOLDER}/(?:{STATE_INDEX}|rank_\d{{5,}}\.safetensors|opaque_rank_\d{{5,}}\.pt))(?:\.tmp)?"
    r"|written_by_\d+\.(?:json|part)",
    re.ASCII,
)
"""Names of files in a checkpoint, finished or not."""
OUR_TEMPORARY = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}step_\d{{8,}}_[0-9a-f]{{8}}", re.ASCII)
"""Names of the temporary folders of all saves."""


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

    @property
    def state_index(self) -> dict[str, Any]:
        return self._read(f"{STATE_FOLDER}/{STATE_INDEX}")

    def _read(self, name: str) -> dict[str, Any]:
        try:
            content = load_json(read_regular(self.path / name))
        except (OSError, ValueError) as error:
            rule = f"{name} is not readable ({type(error).__name__})"
            raise CheckpointError(f"checkpoint {self.path}", rule, FIX_DAMAGED) from error
        if not isinstance(content, dict):
            raise CheckpointError(f"checkpoint {self.path}", f"{name} is not a JSON object", FIX_DAMAGED)
        return content


def state_file_name(rank: int) -> str:
    """Return the name of a rank's file in the state folder."""
    return f"rank_{rank:05d}.safetensors"


def rng_name(rank: str) -> str:
    """Return the name of a rank's file of random generators."""
    return f"rng_rank_{rank}.pt"


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
        if not is_ours(final):
            raise CheckpointError(f"{final}", "exists and is not a checkpoint of ours", "Move it elsewhere.")
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
    if not is_step_name(path.name):
        return "not a step_NNNNNNNN folder"
    try:
        content = load_json(read_regular(manifest))
        entries = [(name, entry["bytes"], entry["checksum"]) for name, entry in content["files"].items()]
        step = content["step"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} is not readable ({type(error).__name__})"
    if problem := _why_incomplete(path, step, [name for name, _, _ in entries]):
        return problem
    for name, size, _ in entries:
        file = path / name
        if not file.is_file() or file.is_symlink():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    if verify_checksums:
        with hashing_threads() as threads:
            for name, _, checksum in entries:
                if file_checksum(path / name, threads) != checksum:
                    return f"{name} does not match its checksum"
    checkpoint = Checkpoint(path, step)
    try:
        trainer, index, _ = checkpoint.trainer, checkpoint.state_index, checkpoint.data_state
    except CheckpointError as error:
        return error.rule
    if (saved_step := trainer.get("step", step)) != step:
        return f"{TRAINER} is of step {saved_step}"
    for name in _files_of_ranks(trainer, index):
        if name not in content["files"]:
            return f"{MANIFEST} does not list {name}"
    return None


def _files_of_ranks(trainer: dict[str, Any], index: dict[str, Any]) -> Iterator[str]:
    """Yield the files that every rank has written; an import seeds the random generators of rank 0 only."""
    for rank in _ranks(index.get("ranks")):
        yield f"{STATE_FOLDER}/{state_file_name(rank)}"
    for rank in _ranks(trainer.get("world_size")):
        if rank == 0 or "imported_from" not in trainer:
            yield rng_name(f"{rank:04d}")


def _ranks(count: Any) -> range:
    return range(max(1, count) if type(count) is int else 1)


def _why_incomplete(path: Path, step: Any, listed: list[str]) -> str | None:
    """Return why a manifest cannot be the one of this folder: a wrong step, missing or additional files."""
    if step != step_of(path):
        return f"{MANIFEST} is of step {step}"
    if unknown := [name for name in listed if not OUR_FILES.fullmatch(name)]:
        return f"{MANIFEST} lists {unknown[0]}, which is not a file of a checkpoint"
    if missing := [name for name in REQUIRED if name not in listed]:
        return f"{MANIFEST} does not list {missing[0]}"
    found = {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir() or file.is_symlink()}
    if unlisted := sorted(found - set(listed) - {MANIFEST}):
        return f"{unlisted[0]} is not in {MANIFEST}"
    return None


def is_ours(path: Path) -> bool:
    """Return whether a folder has nothing in it but files of a checkpoint, so that it may be deleted."""
    return not path.is_symlink() and path.is_dir() and foreign_entry(path) is None


def foreign_entry(path: Path) -> str | None:
    """Return the first file or subfolder of a folder that does not belong to a checkpoint, None if there is none."""
    for entry in sorted(path.rglob("*")):
        name = str(entry.relative_to(path))
        is_folder = entry.is_dir() and not entry.is_symlink()
        if not (name == STATE_FOLDER if is_folder else OUR_FILES.fullmatch(name)):
            return name
    return None


def step_folders(checkpoints: Path) -> list[Path]:
    """Return the folders of all steps, sealed or not, oldest first. Links are not followed."""
    found = [path for path in checkpoints.glob("step_*") if is_step_name(path.name)]
    folders = [path for path in found if path.is_dir() and not path.is_symlink()]
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
    if problem:
        raise CheckpointError(f"checkpoint {path}", problem, "Give a complete checkpoint.")
    return Checkpoint(path, step_of(path))


def require_no_later(checkpoints: Path, step: int) -> None:
    """Refuse to start from `step` if there are later checkpoints, from which the next `--resume auto` would resume."""
    if (newest := newest_step(checkpoints)) > step:
        raise CheckpointError(
            f"start from step {step}",
            f"{checkpoints} has later checkpoints ({step_name(newest)})",
            "Set another run_dir, or use --resume auto.",
        )


def asked_checkpoint(checkpoints: Path, resume: str, verify_checksums: bool) -> Checkpoint | None:
    """Return the checkpoint of `--resume PATH`, None for `auto` and `never`. Raise if the run cannot start from it."""
    checkpoint = None if resume in ("auto", "never") else open_checkpoint(Path(resume), verify_checksums)
    if resume != "auto":
        require_no_later(checkpoints, checkpoint.step if checkpoint else 0)
    return checkpoint


def leftovers(checkpoints: Path) -> list[Path]:
    """Return the remains of interrupted saves and deletions: temporary folders, and steps without a manifest. Without a
    file of ours, only the name of a temporary folder shows whose it is."""
    unsealed = set(step_folders(checkpoints)) - set(sealed_folders(checkpoints))
    found = filter(is_ours, [*checkpoints.glob(f"{TEMPORARY_PREFIX}step_*"), *unsealed])
    return sorted(p for p in found if OUR_TEMPORARY.fullmatch(p.name) or any(f.is_file() for f in p.rglob("*")))


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
    """Return whether a name is one that `step_name` gives; other programs write step_1000."""
    return bool(re.fullmatch(r"step_(\d{8}|[1-9]\d{8,})", name, re.ASCII))


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))
