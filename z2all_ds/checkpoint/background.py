"""The writer process of each rank, which writes snapshots to disk while training continues, and the rank's side of it.

Both sides exchange JSON lines (`base/child_process.py`). The writers of other ranks report to the writer of rank 0 by
files in the temporary folder, so ranks do not wait for each other. A writer ends with its rank; the snapshot that it
was writing is still in memory. Does not load torch.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from z2all_ds.base import child_process
from z2all_ds.base.parent_watch import follow_owner
from z2all_ds.checkpoint.disk_file import copy_of
from z2all_ds.checkpoint.snapshot_check import why_files_damaged
from z2all_ds.checkpoint.writer import Job, Part, write_checkpoint

NICENESS = 10
POLL_SECONDS = 0.05
ABANDON = {"abandon": True}
"""The message that ends a job early: another rank could not write its part."""
Messages = queue.SimpleQueue[dict[str, Any]]


@dataclass(frozen=True)
class Answer:
    """The result of a job."""

    problem: str | None = None


class BackgroundWriter:
    """The rank's side: submits one job at a time and never waits. Starts the process if none is running."""

    def __init__(self) -> None:
        self._process: child_process.JsonProcess | None = None
        self._is_busy = False

    def submit(self, job: Job, slot: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Start to write `files` of the slot, given with size and checksum, to the checkpoint under the same paths."""
        assert not self._is_busy, "one job at a time"
        if self._process is None or self._process.process.poll() is not None:
            command = child_process.module_command("z2all_ds.checkpoint.background")
            self._process = child_process.JsonProcess(command, child_process.package_environment(), shows_errors=True)
        self._is_busy = True
        self._process.send({"job": asdict(job), "slot": str(slot), "files": files})

    def answer(self) -> Answer | None:
        """Return the result of the job, None as long as there is none."""
        if not self._is_busy:
            return None
        assert self._process
        try:
            message = self._process.receive(0)
        except TimeoutError:
            return None
        self._is_busy = False
        return Answer(**message) if message else Answer(f"its writer ended with code {self._process.wait()}")

    def abandon(self) -> None:
        """Make the job fail instead of waiting for other ranks."""
        if self._is_busy and self._process:
            self._process.send(ABANDON)

    def close(self) -> None:
        """End the process, even in the middle of a job."""
        if self._process:
            self._process.close()
            self._process, self._is_busy = None, False


# The process


def main() -> None:
    """Execute jobs until the rank ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the run, which ends this process
    os.nice(NICENESS)
    follow_owner()
    messages: Messages = queue.SimpleQueue()
    threading.Thread(target=_read, args=(messages,), daemon=True).start()
    while True:
        message = messages.get()
        if message == ABANDON:  # the job has ended in the meantime
            continue
        job, slot, files = Job(**message["job"]), Path(message["slot"]), message["files"]
        contents = {name: copy_of(slot / name) for name in files}
        # The checksums come from the rank, not from the slot, where another process could have changed them too.
        check = partial(why_files_damaged, slot, files)
        problem = write_checkpoint(job, contents, partial(_exchange_parts, job, messages), check)
        child_process.write_message(sys.stdout, asdict(Answer(problem)))


def _read(messages: Messages) -> None:
    for message in child_process.read_messages(sys.stdin):
        messages.put(message)
    os._exit(0)  # the rank has closed the pipe or ended


def _exchange_parts(job: Job, messages: Messages, part: Part) -> list[Part]:
    """Pass the part to rank 0 in a file; the writer of rank 0 waits for the files of all ranks or for `ABANDON`."""
    files = [job.temporary / f"written_by_{rank:05d}.json" for rank in range(job.ranks)]
    if job.rank:
        try:
            unfinished = files[job.rank].with_suffix(".part")
            unfinished.write_text(json.dumps(asdict(part)), encoding="utf-8")
            unfinished.replace(files[job.rank])
        except OSError as error:  # a full disk has no room for this file either; the rank tells rank 0 instead
            return [Part({}, part.problem or f"rank {job.rank}: {error}")]
        return [part]
    parts = [part]
    while len(parts) < job.ranks and not parts[-1].problem:
        file = files[len(parts)]
        if file.exists():
            parts.append(Part(**json.loads(file.read_text(encoding="utf-8"))))
            file.unlink()
        elif not messages.empty() and messages.get() == ABANDON:
            parts.append(Part({}, "another rank could not write its part"))
        else:
            time.sleep(POLL_SECONDS)
    return parts


if __name__ == "__main__":
    main()
