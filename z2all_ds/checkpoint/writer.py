"""Writes a checkpoint to disk. Does not load torch.

Every rank writes its files to a temporary folder, hashed and synced. When all are done, rank 0 seals the folder
(layout.py) and deletes the checkpoints that the retention does not keep. The bytes come from the engine's tensors or
from a snapshot in shared memory; the caller is the rank itself or its writer process (background.py).
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.disk_file import Content, write_file
from z2all_ds.checkpoint.retention import Retention, prune


@dataclass(frozen=True)
class Job:
    """One rank's part in writing a checkpoint."""

    checkpoints: str
    step: int
    attempt: str = ""
    """Identifies this write; the same on all ranks."""
    rank: int = 0
    ranks: int = 1
    retention: dict[str, int] = field(default_factory=dict)
    """Fields of `Retention`; nothing is deleted if empty."""
    lock_id: list[int] | None = None
    """Lock of the run folder that this checkpoint is for; it may have been moved meanwhile."""

    @property
    def temporary(self) -> Path:
        return layout.temporary_path(Path(self.checkpoints), self.step, self.attempt)


@dataclass(frozen=True)
class Part:
    """The files that one rank wrote."""

    entries: dict[str, dict[str, Any]]
    """Sizes and checksums, by path in the checkpoint."""
    problem: str | None = None
    """Why it could not write them."""


Exchange = Callable[[Part], list[Part]]
"""Waits for all ranks. Returns all parts on rank 0, at least its own on other ranks."""


def write_checkpoint(
    job: Job,
    files: Mapping[str, Content],
    exchange: Exchange = lambda part: [part],
    check: Callable[[], str | None] = lambda: None,
) -> str | None:
    """Write this rank's files and, on rank 0, seal the checkpoint. Return the problem, None on success.

    `check` is called when the files are written and before the checkpoint is sealed. It returns a problem of their
    source.
    """
    part = _write(job, files, check)
    parts = exchange(part)
    problem = next((part.problem for part in parts if part.problem), None)
    if job.rank == 0:
        try:
            if problem is None and RunFolder(Path(job.checkpoints).parent, job.lock_id).is_lost:
                problem = "the run folder was moved or deleted"
            if problem is None:
                entries = {name: entry for part in parts for name, entry in part.entries.items()}
                layout.seal(Path(job.checkpoints), job.step, entries, job.attempt)
        except OSError as error:
            problem = f"rank 0: {error}"
        if problem:
            shutil.rmtree(job.temporary, ignore_errors=True)
        elif job.retention:
            prune(Path(job.checkpoints), Retention(**job.retention), job.step)
    return problem


def _write(job: Job, files: Mapping[str, Content], check: Callable[[], str | None]) -> Part:
    try:
        (job.temporary / layout.STATE_FOLDER).mkdir(parents=True, exist_ok=True)
        entries = {name: write_file(job.temporary / name, content) for name, content in files.items()}
        if (problem := check()) is None:
            return Part(entries)
    except (OSError, RuntimeError) as error:
        problem = str(error)
    return Part({}, f"rank {job.rank}: {problem}")
