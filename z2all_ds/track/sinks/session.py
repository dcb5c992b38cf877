"""The child process of one sink: sends new records of a run until it is asked to end, then closes the sink.

`python -m z2all_ds.track.sinks.session RUN SINK OWNER_PID SETTINGS`. A byte on stdin asks it to end, and so does the
end of its owner. It reports on stdout, one JSON object per line: `waiting` (for another session's end), `open` (where
the curves can be seen, processes started), `sent` (number of records), `closing`, `failed` (why), `finished`. Each
report also restarts a timer, whose SIGALRM ends a session that hangs.
"""

import fcntl
import heapq
import json
import math
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from z2all_ds.base.atomic import open_own
from z2all_ds.base.machine import child_processes
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.sinks.records import Progress, RecordFollower
from z2all_ds.track.sinks.settings import LABELS, WANDB, Sink, SinkFailure, SinkSettings
from z2all_ds.track.sinks.tensorboard_sink import TensorBoardSink
from z2all_ds.track.sinks.wandb_sink import WandbSink

START_SECONDS = 120.0
"""Limit for the first connection to W&B's server."""
SPARE_SECONDS = 5.0
"""Added to `finish_seconds` when a sink closes; an owner that waits ends it earlier."""
READ_EVERY_SECONDS = 1.0
LINES_AT_ONCE = 500
"""Lines sent before the sink must settle."""
MOST_CHARACTERS = 500
"""Longest error message: a report must fit into one atomic write to a pipe."""
NICENESS = 10
Line = dict[str, Any]


class Owner:
    """The process that started the session: it receives the reports, and asks the session to end."""

    def __init__(self, pid: int, label: str, settings: SinkSettings) -> None:
        self._pid, self._label, self._settings = pid, label, settings
        self._reports = os.dup(1)
        os.set_blocking(self._reports, False)  # the owner may not read for a long time
        os.dup2(2, 1)  # for the output of libraries
        signal.setitimer(signal.ITIMER_REAL, START_SECONDS)

    def report(self, state: str, message: str = "", **facts: Any) -> None:
        line = json.dumps({"state": state, "message": message[:MOST_CHARACTERS], **facts})
        with suppress(OSError):  # nobody reads, or the disk of the log is full
            os.write(self._reports, line.encode() + b"\n")
            if message:
                print(f"{self._label}: {message}", file=sys.stderr, flush=True)
        patience = {"waiting": START_SECONDS, "closing": self._settings.finish_seconds + SPARE_SECONDS}
        signal.setitimer(signal.ITIMER_REAL, patience.get(state, self._settings.hang_seconds))

    def wants_end(self, timeout_seconds: float) -> bool:
        """Return whether the session must end; wait for the request until the timeout."""
        return bool(select.select([0], [], [], timeout_seconds)[0]) or os.getppid() != self._pid


def run_session(folder: RunFolder, name: str, settings: SinkSettings, owner: Owner) -> None:
    """Send records until the owner asks to end and everything is delivered."""
    folder.sinks.mkdir(parents=True, exist_ok=True)
    with open(folder.sinks / f".{name}.lock", "ab", opener=open_own) as lock:
        while not _is_locked(lock.fileno()):  # the session of a killed run may still send
            owner.report("waiting")
            if owner.wants_end(READ_EVERY_SECONDS):
                raise SinkFailure("another process is sending this run's records")
        progress = Progress.load(folder.sinks / f"{name}.json")
        sink: Sink = WandbSink(folder, settings, progress) if name == WANDB else TensorBoardSink(folder)
        owner.report("open", sink.open(), processes=child_processes(os.getpid()))
        _follow(folder, sink, progress, settings.destination(name), owner)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _follow(folder: RunFolder, sink: Sink, progress: Progress, destination: str, owner: Owner) -> None:
    metrics = RecordFollower(folder.metrics, progress.mark(destination, "metrics"))
    events = RecordFollower(folder.events, progress.mark(destination, "events"))
    held: list[Line] = []
    """Events later than the last record read."""
    ends = False
    while not ends or metrics.has_more:
        ends = owner.wants_end(0.0 if metrics.has_more else READ_EVERY_SECONDS)
        held += events.read()
        found = metrics.read()
        lines, held = in_order_of_time(found, held, metrics.has_more)
        delivered = True
        for begin in range(0, max(1, len(lines)), LINES_AT_ONCE):  # also without lines: the sink must settle
            part = lines[begin : begin + LINES_AT_ONCE]
            sink.send(part)
            delivered = sink.settle()
            owner.report("sent", records=sum("event" not in line for line in part))
        if delivered and lines and not held:
            progress.save_marks(destination, metrics=metrics.mark, events=events.mark)
    owner.report("closing")
    sink.close()
    progress.save_marks(destination, metrics=metrics.mark, events=events.mark)


def in_order_of_time(records: Sequence[Line], events: Sequence[Line], has_more: bool) -> tuple[list[Line], list[Line]]:
    """Return both in one list, each event before the first later record; and the events that must wait for such a
    record, if the file has more."""
    until = max((record["time_unix"] for record in records), default=-math.inf) if has_more else math.inf
    ready = [event for event in events if event["time_unix"] <= until]
    held = [event for event in events if event["time_unix"] > until]
    return list(heapq.merge(ready, records, key=lambda line: float(line["time_unix"]))), held


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # may be sent to a whole job; the owner decides
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    run, name, pid, text = sys.argv[1:]
    settings = SinkSettings(**json.loads(text))
    owner = Owner(int(pid), LABELS[name], settings)
    try:
        run_session(RunFolder(Path(run)), name, settings, owner)
        owner.report("finished")
    except SinkFailure as error:
        owner.report("failed", str(error), is_permanent=error.is_permanent)
    except BaseException as error:  # any error of a library
        owner.report("failed", f"{type(error).__name__}: {error}", is_permanent=False)
    os._exit(0)  # not sys.exit: exit handlers of libraries may wait for a dead service


if __name__ == "__main__":
    main()
