"""A rank's end of the line to its writer (`writer.py`): hands over jobs, hears what became of them, never waits."""

import json
import os
import queue
import subprocess
import sys
import threading
from dataclasses import asdict

from z2all_ds.base.parent_watch import OWNER_VARIABLE, owner_mark
from z2all_ds.checkpoint.writer import ABANDON, Answer, Job


class BackgroundWriter:
    """One job at a time. The process is started with the first one, and again if it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._listener: threading.Thread | None = None
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.job: Job | None = None
        """At work on it."""

    def submit(self, job: Job) -> None:
        assert self.job is None, "it is at work"
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        self.job = job
        self._send(json.dumps(asdict(job)))

    def answer(self) -> Answer | None:
        """What became of the job, as soon as that is known."""
        if self.job is None:
            return None
        assert self._process and self._listener
        has_ended = not self._listener.is_alive()  # looked at first: an answer may be its last word
        if self._answers.empty() and not has_ended:
            return None
        job, self.job = self.job, None
        if not self._answers.empty():
            return self._answers.get()
        return Answer(job.step, 0.0, f"its writer ended with code {self._process.wait()}")

    def abandon(self) -> None:
        """It must not wait for the other ranks any more; its answer says so."""
        if self.job:
            self._send(ABANDON)

    def close(self) -> None:
        """Ends it, whatever it is doing."""
        if self._process:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin
            self._process.stdin.close()
            self._process, self.job = None, None

    def _start(self) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", "z2all_ds.checkpoint.writer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, OWNER_VARIABLE: owner_mark()},
        )
        self._answers = queue.SimpleQueue()
        self._listener = threading.Thread(target=_listen, args=(process, self._answers), daemon=True)
        self._listener.start()
        return process

    def _send(self, line: str) -> None:
        assert self._process and self._process.stdin
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: the listener says so


def _listen(process: "subprocess.Popen[str]", answers: "queue.SimpleQueue[Answer]") -> None:
    assert process.stdout
    with process.stdout:
        for line in process.stdout:
            answers.put(Answer(**json.loads(line)))
