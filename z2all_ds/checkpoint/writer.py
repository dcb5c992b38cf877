"""The process that brings snapshots onto the disk while training goes on: one a rank, started by `background.py`.

Jobs come as lines of JSON on stdin, answers go out the same way. A rank's writer copies that rank's files and leaves a
note of it beside them; rank 0's waits for the notes of all and seals the checkpoint. So no rank waits for another, and
training has no part in it. It ends with the rank that started it: what it was writing is still in memory. Loads no
torch.
"""

import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from z2all_ds.base.parent_watch import follow_owner
from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.disk_file import copy_to_disk
from z2all_ds.checkpoint.retention import Retention, prune

NICENESS = 10
LOOK_EVERY_SECONDS = 0.05
ABANDON = "abandon"
"""Instead of a job: another rank could not write its part."""
PROBLEM = "problem"


@dataclass(frozen=True)
class Job:
    """One rank's part of a checkpoint."""

    step: int
    attempt: str
    """The same on all ranks, and of this write alone."""
    slot: str
    files: tuple[str, ...]
    """Paths in the slot, and in the checkpoint."""
    checkpoints: str
    rank: int
    ranks: int
    retention: dict[str, int]


@dataclass(frozen=True)
class Answer:
    """What became of a job."""

    step: int
    seconds: float
    problem: str | None = None


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the run, which ends this process when it ends
    os.nice(NICENESS)
    follow_owner()
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    while True:
        line = lines.get()
        if line != ABANDON:  # one that came too late
            answer = _do(Job(**json.loads(line)), lines)
            print(json.dumps(asdict(answer)), flush=True)


def _read(lines: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        lines.put(line.strip())
    os._exit(0)  # the rank has closed the pipe: it is done, or gone


def _do(job: Job, lines: "queue.SimpleQueue[str]") -> Answer:
    started = time.monotonic()
    temporary = layout.temporary_path(Path(job.checkpoints), job.step, job.attempt)
    problem = None
    try:
        _write(job, temporary)
        if job.rank == 0:
            problem = _seal(job, temporary, lines)
    except OSError as error:
        problem = str(error)
        with suppress(OSError):  # a full disk may have no room for that either; then the rank tells rank 0 in time
            _leave_note(temporary, job.rank, {PROBLEM: f"rank {job.rank}: {problem}"})
    if problem and job.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    return Answer(job.step, time.monotonic() - started, problem)


def _write(job: Job, temporary: Path) -> None:
    (temporary / layout.STATE_FOLDER).mkdir(parents=True, exist_ok=True)
    entries = {name: copy_to_disk(Path(job.slot) / name, temporary / name) for name in job.files}
    _leave_note(temporary, job.rank, entries)


def _seal(job: Job, temporary: Path, lines: "queue.SimpleQueue[str]") -> str | None:
    """Returns why not."""
    known: dict[str, dict[str, Any]] = {}
    for rank in range(job.ranks):
        note = _note(temporary, rank)
        while not note.exists():
            if not lines.empty() and lines.get() == ABANDON:
                return "another rank could not write its part"
            time.sleep(LOOK_EVERY_SECONDS)
        entries = json.loads(note.read_text(encoding="utf-8"))
        if PROBLEM in entries:
            return str(entries[PROBLEM])
        known.update(entries)
        note.unlink()
    checkpoints = Path(job.checkpoints)
    layout.seal(checkpoints, job.step, known, job.attempt)
    prune(checkpoints, Retention(**job.retention), job.step)
    return None


def _leave_note(temporary: Path, rank: int, content: dict[str, Any]) -> None:
    note = _note(temporary, rank)
    note.with_suffix(".part").write_text(json.dumps(content), encoding="utf-8")
    note.with_suffix(".part").replace(note)


def _note(temporary: Path, rank: int) -> Path:
    return temporary / f"written_by_{rank:05d}.json"


if __name__ == "__main__":
    main()
