"""The process of one sink: hands on what is new in a run's files until it is asked to end, then closes the sink.

`python -m z2all_ds.track.sinks.session RUN SINK SETTINGS`. A byte on stdin asks for the end, and so does its end: then
nobody is left who would end a session that cannot finish, and it does so itself. Tells its keeper on stdout, a JSON
object a line: `waiting` (for another session's end), `open` (processes to end with it, where to look), `sent` (how many
records; with none a sign of life), `closing`, `failed`, `finished`. What others print goes to stderr.
"""

import fcntl
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from z2all_ds.base.machine import child_processes
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.sinks.records import Progress, RecordFollower
from z2all_ds.track.sinks.settings import TENSORBOARD, WANDB, Sink, SinkFailure, SinkSettings
from z2all_ds.track.sinks.tensorboard_sink import TensorBoardSink
from z2all_ds.track.sinks.wandb_sink import WandbSink

LOOK_EVERY_SECONDS = 1.0
LINES_A_TURN = 500
"""Sent before the sink is asked whether it has them; one that needs longer than `hang_seconds` for them hangs."""
ORPHAN_SECONDS = 30.0
Tell = Callable[..., None]
Line = dict[str, Any]


def run_session(folder: RunFolder, name: str, settings: SinkSettings, tell: Tell) -> None:
    """Returns when it was asked to end and everything is delivered."""
    folder.sinks.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder.sinks / f".{name}.lock", tell)
    try:
        progress = Progress.load(folder.sinks / f"{name}.json")
        sink: Sink = WandbSink(folder, settings, progress) if name == WANDB else TensorBoardSink(folder)
        seen_at = sink.open()
        tell("open", processes=child_processes(os.getpid()), seen_at=seen_at)
        try:
            _follow(folder, sink, progress, settings.place(name), tell)
        except Exception:
            with suppress(OSError):
                progress.save()  # what was sent is known better by it than by the last one kept
            raise
    finally:
        os.close(lock)


def _follow(folder: RunFolder, sink: Sink, progress: Progress, place: str, tell: Tell) -> None:
    metrics = RecordFollower(folder.metrics, progress.mark(place, "metrics"))
    events = RecordFollower(folder.events, progress.mark(place, "events"))
    happened: list[Line] = []
    """Events of which records before them may be unread."""
    ends = False
    while not ends or metrics.has_more:
        ends = _is_asked_to_end(0.0 if metrics.has_more else LOOK_EVERY_SECONDS) or ends
        happened += events.read()
        found = metrics.read()
        lines, happened = in_order_of_time(found, happened, metrics.has_more)
        delivered = True
        for begin in range(0, max(1, len(lines)), LINES_A_TURN):  # once without any: is it there?
            turn = lines[begin : begin + LINES_A_TURN]
            if turn:
                sink.send(turn)
            delivered = sink.settle()
            tell("sent", records=sum("event" not in line for line in turn))
        if delivered and not happened and lines:
            progress.marks[place] = {"metrics": metrics.mark, "events": events.mark}
            progress.save()
    tell("closing")
    sink.close()
    progress.marks[place] = {"metrics": metrics.mark, "events": events.mark}
    progress.save()


def in_order_of_time(records: Sequence[Line], events: Sequence[Line], has_more: bool) -> tuple[list[Line], list[Line]]:
    """Both in one list, an event before the first record that was written after it; and the events that still have to
    wait for such a record, where there are more."""
    lines: list[Line] = []
    place = 0
    for record in records:
        while place < len(events) and events[place]["time_unix"] <= record["time_unix"]:
            lines.append(events[place])
            place += 1
        lines.append(record)
    rest = list(events[place:])
    return (lines, rest) if has_more else ([*lines, *rest], [])


def _is_asked_to_end(timeout_seconds: float) -> bool:
    return bool(select.select([0], [], [], timeout_seconds)[0])


def _lock(path: Path, tell: Tell) -> int:
    """Two sessions of one sink would send everything twice: that of a run just killed may still be at it."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            tell("waiting")
            if _is_asked_to_end(LOOK_EVERY_SECONDS):
                os.close(descriptor)
                raise SinkFailure("another process is sending this run's records") from None


def _end_after(seconds: float) -> None:
    """Where nobody is left to end this process: some time after its stdin has ended."""

    def watch() -> None:
        poller = select.poll()
        poller.register(0, 0)  # its end alone, which is always told
        while not any(event & (select.POLLHUP | select.POLLERR) for _, event in poller.poll()):
            time.sleep(LOOK_EVERY_SECONDS)
        time.sleep(seconds)
        for pid, _ in child_processes(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="end-watch", daemon=True).start()


def main() -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM):  # the keeper decides; a launcher that ends a whole tree does not
        signal.signal(number, signal.SIG_IGN)
    reports = os.dup(1)
    os.dup2(2, 1)

    def tell(state: str, **facts: Any) -> None:
        with suppress(OSError):  # nobody may be listening any more
            os.write(reports, json.dumps({"state": state, **facts}).encode() + b"\n")

    run, name, text = sys.argv[1:]
    assert name in (WANDB, TENSORBOARD)
    settings = SinkSettings.from_argument(text)
    _end_after(min(settings.finish_seconds, ORPHAN_SECONDS))
    try:
        run_session(RunFolder(Path(run)), name, settings, tell)
    except SinkFailure as error:
        tell("failed", why=str(error), for_good=error.for_good)
    except BaseException as error:  # whatever a sink raises
        tell("failed", why=f"{type(error).__name__}: {error}", for_good=False)
    else:
        tell("finished")
    sys.stdout.flush()
    # Not sys.exit: what libraries want to do at exit may wait for a service that is not there any more.
    os._exit(0)


if __name__ == "__main__":
    main()
