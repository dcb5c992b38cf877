"""The process that keeps a run's sinks at work: starts a session for each, ends one that hangs, starts it again.

`python -m z2all_ds.track.sinks.keeper RUN OWNER SETTINGS`. Ends on a byte on stdin or its end, on SIGTERM, or when its
owner is gone: sessions then have `finish_seconds` to deliver what is left. What a person should know goes to stdout, a
line each; a sink that fails is worth one.
"""

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from z2all_ds.base.machine import child_processes, process_is_alive
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.sinks.records import Progress, records_left
from z2all_ds.track.sinks.settings import LABELS, SinkSettings

LOOK_EVERY_SECONDS = 0.25
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
START_SECONDS = 120.0
"""W&B may take that long to meet its server."""


class Session:
    """One session process, seen from outside."""

    def __init__(self, folder: RunFolder, sink: str, settings: SinkSettings) -> None:
        command = [sys.executable, "-m", "z2all_ds.track.sinks.session", str(folder.root), sink, settings.to_argument()]
        log, pipe = open_log(folder), subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=log, bufsize=0, start_new_session=True
            )
        finally:
            os.close(log)
        assert self._process.stdout
        os.set_blocking(self._process.stdout.fileno(), False)
        self._heard = b""
        self._heard_at = time.monotonic()
        self._patience_seconds, self._settings = START_SECONDS, settings
        self._processes: list[tuple[int, int]] = []

    def finish(self) -> None:
        assert self._process.stdin
        with suppress(OSError):
            self._process.stdin.write(b"\n")  # not its end: by that it knows that nobody is left

    def reports(self) -> list[dict[str, Any]]:
        """What it has told since the last look; a last one of our own where it ended without a word or hangs."""
        assert self._process.stdout
        ended = self._process.poll() is not None  # before reading: what it told is then all there
        while chunk := read_now(self._process.stdout.fileno()):
            self._heard += chunk
        *lines, self._heard = self._heard.split(b"\n")
        told = [json.loads(line) for line in lines]
        for report in told:
            self._heard_at = time.monotonic()
            is_waiting = report["state"] == "waiting"
            self._patience_seconds = START_SECONDS if is_waiting else self._settings.hang_seconds
            if report["state"] == "open":
                self._processes = [(pid, start) for pid, start in report["processes"]]
            elif report["state"] == "closing":
                self._patience_seconds = max(self._settings.hang_seconds, self._settings.finish_seconds)
        if told and told[-1]["state"] in ("failed", "finished"):
            return told
        if ended:
            code = self._process.returncode
            why = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with code {code}"
            return [*told, {"state": "failed", "why": why, "for_good": False}]
        if time.monotonic() - self._heard_at > self._patience_seconds:
            why = f"it does not answer for {self._patience_seconds:.0f} s"
            return [*told, {"state": "failed", "why": why, "for_good": False}]
        return told

    def end(self) -> None:
        """With what it has started: W&B's service has a session of its own, and ends by itself only if it can."""
        started = {*self._processes, *child_processes(self._process.pid)}
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pid, start in started:
            if process_is_alive(pid, start):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL) if os.getpgid(pid) == pid else os.kill(pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with suppress(OSError):
                pipe.close()


def open_log(folder: RunFolder) -> int:
    """For everything that sinks and their libraries print; nowhere, if the run folder cannot take it."""
    path = folder.root / "logs" / "sinks.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def read_now(descriptor: int) -> bytes:
    """What is there now of a pipe that does not block; empty where there is nothing, or its other end is closed."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""


class KeptSink:
    """One sink of a run: its session, or the pause before the next one."""

    def __init__(self, folder: RunFolder, sink: str, settings: SinkSettings) -> None:
        self._folder, self._sink, self._settings = folder, sink, settings
        self._session: Session | None = None
        self._start_at = self._began_at = time.monotonic()
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._shown = self._warned = self._finishing = False
        self.is_over = False
        """Everything is delivered, or there is no use in another try."""

    def look(self) -> str | None:
        """Does what is due; a line to say where it begins, or fails, for the first time."""
        if self.is_over:
            return None
        if self._session is None:
            if time.monotonic() >= self._start_at:
                return self._start()
            return None
        line = None
        for report in self._session.reports():
            if report["state"] == "sent" and time.monotonic() - self._began_at > LONGEST_PAUSE_SECONDS:
                self._pause_seconds = FIRST_PAUSE_SECONDS  # not at once: it may take some each time before it fails
            elif report["state"] == "open":
                begins = f"{LABELS[self._sink]}: {report['seen_at']}"
                sys.stderr.write(f"{begins}\n")
                self._shown, line = True, None if self._shown else begins
            elif report["state"] == "finished":
                self.is_over = True
            elif report["state"] == "failed":
                return self._failed(report["why"], report["for_good"])
        if self.is_over:
            self._session.end()
            self._session = None
        return line

    def finish(self) -> None:
        """Asks for the end; a sink that waits for its next try has it now."""
        self._finishing, self._start_at, self._pause_seconds = True, time.monotonic(), FIRST_PAUSE_SECONDS
        if self._session:
            self._session.finish()

    def give_up(self) -> str | None:
        """Ends it as it is; a line to say about what is left."""
        if self._session:
            self._session.end()
            self._session = None
        progress = Progress.load(self._folder.sinks / f"{self._sink}.json")
        left = records_left(self._folder.metrics, progress.mark(self._settings.place(self._sink), "metrics"))
        if not left:
            return None
        way = "" if self._sink == "wandb" else f" --to {self._sink}"
        command = f"z2all track sync {shlex.quote(str(self._folder.root))}{way}"
        return f"{LABELS[self._sink]} has not confirmed {left:,} records: `{command}` sends what it lacks"

    def _start(self) -> str | None:
        self._began_at = time.monotonic()
        try:
            self._session = Session(self._folder, self._sink, self._settings)
        except OSError as error:  # no process, no memory
            return self._failed(str(error), for_good=False)
        if self._finishing:
            self._session.finish()
        return None

    def _failed(self, why: str, for_good: bool) -> str | None:
        if self._session:
            self._session.end()
            self._session = None
        sys.stderr.write(f"{LABELS[self._sink]}: {why}\n")
        self.is_over = for_good
        self._start_at = time.monotonic() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
        if self._warned:
            return None
        self._warned = True
        rest = "switched off" if for_good else "it is tried again, and its records wait in metrics.jsonl"
        return f"{LABELS[self._sink]} fails ({' '.join(why.split())}): {rest}; training goes on"


def keep(folder: RunFolder, owner: tuple[int, int | None], settings: SinkSettings) -> None:
    """Until the owner wants no more, and some seconds longer."""
    sinks = [KeptSink(folder, sink, settings) for sink in settings.sinks]
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGTERM, ask)
    deadline: float | None = None
    while not (deadline and (time.monotonic() > deadline or all(sink.is_over for sink in sinks))):
        wants_more = not deadline and not asked and process_is_alive(*owner)
        if deadline:
            time.sleep(LOOK_EVERY_SECONDS)
        elif not wants_more or _stdin_says_end():
            deadline = time.monotonic() + settings.finish_seconds
            for sink in sinks:
                sink.finish()
        for sink in sinks:
            _say(sink.look())
    for sink in sinks:
        _say(sink.give_up())


def _stdin_says_end() -> bool:
    """Waits a moment for it. A byte will do: other processes may have inherited the pipe, and hold it open."""
    return bool(select.select([0], [], [], LOOK_EVERY_SECONDS)[0])


def _say(line: str | None) -> None:
    if line:
        with suppress(OSError):  # nobody may be listening any more
            os.write(1, line.encode() + b"\n")


def main() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run, mark, text = sys.argv[1:]
    pid, _, started = mark.partition(":")
    keep(
        RunFolder(Path(run)), (int(pid), int(started) if started.isdigit() else None), SinkSettings.from_argument(text)
    )
    sys.exit(0)


if __name__ == "__main__":
    main()
