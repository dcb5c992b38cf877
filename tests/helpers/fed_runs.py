"""Runs with real sinks but without training: the tests write the records that rank 0 would write."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from z2all_ds.base.config.sections import TrackSection
from z2all_ds.base.machine import child_processes, process_is_alive
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.sinks.feed import SinkFeed
from z2all_ds.track.writer import RunWriter

Processes = dict[str, tuple[int, int]]


class FedRun:
    """A run folder with active sinks; `said` contains the printed lines."""

    def __init__(self, root: Path, hang_seconds: float = 30.0, **track: Any) -> None:
        self.folder = RunFolder(root)
        root.mkdir(parents=True, exist_ok=True)
        self.said: list[str] = []
        self._writer = RunWriter(self.folder)
        self.feed = SinkFeed(TrackSection(**track), self.folder, self.said.append, hang_seconds)
        self.poll_seconds: list[float] = []

    def steps(self, first: int, last: int, pause_seconds: float = 0.0) -> None:
        for step in range(first, last + 1):
            self._writer.metric({"step": step, "loss": 1 / step, "loss_of_中文": 2.0, "time_unix": time.time()})
            began = time.monotonic()
            self.feed.poll()
            self.poll_seconds.append(time.monotonic() - began)
            time.sleep(pause_seconds)

    def event(self, kind: str, step: int) -> None:
        self._writer.event(kind, step=step)

    def go_back_to(self, step: int) -> None:
        self._writer.drop_metrics_after(step)

    def wait_for(self, what: Callable[[], Any], seconds: float = 40.0) -> Any:
        """Wait until `what` returns a true value, and return it; the sinks are polled meanwhile, as in training."""
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s; said: {self.said}"
            self.feed.poll()
            time.sleep(0.05)
        return found

    def close(self, waits: bool = True) -> None:
        self._writer.close()
        self.feed.close(waits)


def sink_processes(owner: int) -> Processes:
    """Return name -> (pid, start time) of all processes that feed the sinks of a process."""
    found: Processes = {}
    todo = child_processes(owner)
    while todo:
        pid, start = todo.pop()
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(word.endswith("sinks.session") for word in words):
            found[words[4]] = (pid, start)
        elif words[0].endswith("wandb-core"):
            found["wandb-core"] = (pid, start)
        todo += child_processes(pid)
    return found


def hurt(process: tuple[int, int], number: signal.Signals) -> None:
    assert process_is_alive(*process)
    os.kill(process[0], number)
