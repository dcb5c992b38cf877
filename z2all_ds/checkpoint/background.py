"""The writer process per rank, which brings snapshots to the disk while training continues, and the rank's end of it.

Jobs are lines of JSON on its stdin, answers are lines on its stdout. Writers tell rank 0's writer what they wrote by
notes in the temporary folder: no rank waits for another, and training has no part in it. A writer ends with the rank
that started it; what it was writing is still in memory. Loads no torch.
"""

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from z2all_ds.base.child_process import module_command, package_environment, start
from z2all_ds.base.parent_watch import follow_owner
from z2all_ds.checkpoint.disk_file import copied
from z2all_ds.checkpoint.writer import Job, Part, write_checkpoint

NICENESS = 10
LOOK_EVERY_SECONDS = 0.05
ABANDON = "abandon"
"""Instead of a job: another rank could not write its part."""


@dataclass(frozen=True)
class Answer:
    """What became of a job."""

    problem: str | None = None


class BackgroundWriter:
    """The rank's end: hands over one job at a time and never waits. Starts the process where none is running."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._is_busy = False

    def submit(self, job: Job, slot: Path, files: Sequence[str]) -> None:
        """`files` are paths in the slot, and in the checkpoint."""
        assert not self._is_busy, "one job at a time"
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._is_busy = True
        self._send(json.dumps({"job": asdict(job), "slot": str(slot), "files": list(files)}))

    def answer(self) -> Answer | None:
        """What became of the job, as soon as that is known."""
        if not self._is_busy:
            return None
        assert self._process and self._process.stdout
        poller = select.poll()
        poller.register(self._process.stdout, select.POLLIN)
        if not poller.poll(0):
            return None
        self._is_busy = False
        line = self._process.stdout.readline()
        return Answer(json.loads(line) if line else f"its writer ended with code {self._process.wait()}")

    def abandon(self) -> None:
        """Makes the job fail instead of waiting for other ranks."""
        if self._is_busy:
            self._send(ABANDON)

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        if self._process:
            self._process.kill()
            self._process.communicate()  # also closes the pipes
            self._process, self._is_busy = None, False

    def _start(self) -> None:
        command = module_command("z2all_ds.checkpoint.background")
        environment, pipe = package_environment(), subprocess.PIPE
        self._process = start(command, environment, stdin=pipe, stdout=pipe, text=True, start_new_session=False)

    def _send(self, line: str) -> None:
        assert self._process and self._process.stdin
        with suppress(BrokenPipeError):  # the process has ended; `answer` notices that
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


# The process


def main() -> None:
    """Does jobs until the rank ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the run, which ends this process when it ends
    os.nice(NICENESS)
    follow_owner()
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    while True:
        line = lines.get()
        if line == ABANDON:  # it came too late
            continue
        asked = json.loads(line)
        job, files = Job(**asked["job"]), {name: copied(Path(asked["slot"]) / name) for name in asked["files"]}
        print(json.dumps(write_checkpoint(job, files, partial(_exchange_notes, job, lines))), flush=True)


def _read(lines: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        lines.put(line.strip())
    os._exit(0)  # the rank has closed the pipe or ended


def _exchange_notes(job: Job, lines: "queue.SimpleQueue[str]", part: Part) -> list[Part]:
    """Leaves a note for rank 0, whose writer waits for the notes of all ranks or for `ABANDON`."""
    notes = [job.temporary / f"written_by_{rank:05d}.json" for rank in range(job.ranks)]
    if job.rank:
        try:
            unfinished = notes[job.rank].with_suffix(".part")
            unfinished.write_text(json.dumps(asdict(part)), encoding="utf-8")
            unfinished.replace(notes[job.rank])
        except OSError as error:  # a full disk has no room for a note; the rank tells rank 0 in time
            return [Part({}, part.problem or f"rank {job.rank}: {error}")]
        return [part]
    parts = [part]
    while len(parts) < job.ranks and not parts[-1].problem:
        note = notes[len(parts)]
        if note.exists():
            parts.append(Part(**json.loads(note.read_text(encoding="utf-8"))))
            note.unlink()
        elif not lines.empty() and lines.get() == ABANDON:
            parts.append(Part({}, "another rank could not write its part"))
        else:
            time.sleep(LOOK_EVERY_SECONDS)
    return parts


if __name__ == "__main__":
    main()
