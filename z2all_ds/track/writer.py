"""JSON-lines files of a run: metrics.jsonl (one flat record per step), events.jsonl and health.jsonl (cost of steps per
rank). They are opened and truncated by reading only their ends, whatever their length."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any

import orjson

from z2all_ds.base.atomic import open_own
from z2all_ds.base.console import say
from z2all_ds.base.errors import ConfigError, DataError, Z2allError
from z2all_ds.base.fault_records import LAUNCHES
from z2all_ds.base.json_text import load_json
from z2all_ds.base.run_folder import SILENT_SECONDS, RunFolder
from z2all_ds.base.storage.open_files import open_regular

OUTCOMES = ("started", "stopped", "requeue", "done", "failed")
NO_END = "the run ended without a record: it was killed, or its machine stopped"
TAIL_BYTES = 1 << 16
NUMBER = (int, float, type(None))
"""Types of steps and times in records; some records have none."""


class RunWriter:
    """Writes all three files, on rank 0. On a full disk it warns once and keeps records in memory until they fit."""

    def __init__(self, folder: RunFolder, warn: Callable[[str], None] = say) -> None:
        self._warn = warn
        self._metrics, self._events, self._health = (
            _LineFile(path, warn) for path in (folder.metrics, folder.events, folder.health)
        )

    def metric(self, record: dict[str, Any]) -> None:
        self._metrics.append(record)

    def event(self, kind: str, **details: Any) -> None:
        self._events.append(_event(kind, **details))

    def health(self, step: int, **figures_by_rank: list[float]) -> None:
        self._health.append({"step": step, "time_unix": round(time.time(), 3), **figures_by_rank})

    def drop_metrics_after(self, step: int) -> int:
        """Drop records of later steps, which will be repeated. Return their number."""
        self._metrics.close()
        dropped = drop_metrics_after(self._metrics.path, step)
        self._metrics = _LineFile(self._metrics.path, self._warn)
        return dropped

    def close(self) -> None:
        for file in (self._metrics, self._events, self._health):
            file.close()


def _event(kind: str, **details: Any) -> dict[str, Any]:
    return {"time_unix": round(time.time(), 3), "event": kind, **details}


class _LineFile:
    """A file to append lines to. A line is in the file when `append` returns, so a killed run loses none."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path, self._warn = path, warn
        self._handle = open_own(path, os.O_WRONLY | os.O_APPEND, 0o644)
        _drop_torn_line(path)
        self._waiting = b""

    def append(self, record: dict[str, Any]) -> None:
        was_waiting = bool(self._waiting)
        self._waiting += json.dumps(record, ensure_ascii=False).encode() + b"\n"
        error = self._write()
        if error and not was_waiting:
            self._warn(f"{self.path} cannot be written ({error.strerror}); its records wait in memory")

    def close(self) -> None:
        if error := self._write():
            lines = self._waiting.count(b"\n")
            self._warn(f"{self.path} cannot be written ({error.strerror}); {lines} records are lost")
        os.close(self._handle)

    def _write(self) -> OSError | None:
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._handle, self._waiting) :]
        except OSError as error:
            return error
        return None


def _drop_torn_line(path: Path) -> None:
    """Remove a last line that a crash has cut off; the next record would be appended to it."""
    end = next((start + len(line) for start, line in _lines_from_the_end(path) if line.endswith(b"\n")), 0)
    if end != path.stat().st_size:
        os.truncate(path, end)


def _lines_from_the_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield offset and content of each line, the last one first, which may be cut off."""
    with _open(path) as file:
        begin = file.seek(0, os.SEEK_END)
        content = b""
        """From `begin` to the beginning of the last line yielded."""
        while begin or content:
            start = content.rfind(b"\n", 0, len(content) - 1) + 1
            if start == 0 and begin:
                length = min(begin, max(TAIL_BYTES, len(content)))  # doubled: lines of any length in linear time
                begin -= length
                file.seek(begin)
                content = file.read(length) + content
                continue
            yield begin + start, content[start:]
            content = content[:start]


def _open(path: Path) -> IO[bytes]:
    """Open a file of records for reading; refuse a FIFO, whose reading may never end."""
    try:
        return os.fdopen(open_regular(path), "rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"file {path}", f"cannot be read ({error.strerror})", "Move it elsewhere.") from None


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON-lines file; skip damaged lines, and a last line that a crash has cut off."""
    if not path.exists():
        return
    with _open(path) as file:  # bytes: the cut may be inside a character
        for line in file:
            if line.endswith(b"\n") and (record := parse_line(line)) is not None:
                yield record


def last_record(path: Path) -> dict[str, Any] | None:
    """Return the last whole record, found from the file's end."""
    lines = _lines_from_the_end(path) if path.exists() else iter(())
    found = (parse_line(line) for _, line in lines if line.endswith(b"\n"))
    return next((record for record in found if record is not None), None)


def parse_record(line: bytes) -> dict[str, Any]:
    """Parse one line; raise ValueError if it is not JSON."""
    try:
        record: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError:  # Infinity and NaN, which Python writes although JSON does not have them
        record = load_json(line)
    return record


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Parse one line; return None if it is not a record, or if its step or time is not a number."""
    try:
        record: Any = parse_record(line)
    except ValueError:  # also raised for invalid UTF-8
        return None
    if not isinstance(record, dict):
        return None
    is_valid = isinstance(record.get("step"), NUMBER) and isinstance(record.get("time_unix"), NUMBER)
    return record if is_valid else None


def drop_metrics_after(path: Path, step: int) -> int:
    """Drop records of steps that will be repeated after a resume from `step`. Return their number."""
    if not path.exists():
        return 0
    dropped, size = 0, path.stat().st_size
    end = size
    for start, line in _lines_from_the_end(path):  # steps only grow
        found = (parse_line(line) or {}).get("step") if line.endswith(b"\n") else None
        if isinstance(found, int) and found <= step:
            break
        dropped, end = dropped + 1, start
    if end != size:
        with open(path, "ab", opener=open_own) as file:
            file.truncate(end)
    return dropped


def last_outcome(folder: RunFolder, launch: str | None = None) -> str | None:
    """Return the last outcome that the run has recorded, None if there is none.

    `started`: it runs, or died. `stopped`: a planned stop. `requeue`: a requested stop. `done`: finished. `failed`: an
    error, perhaps before the run was started or continued. `launch`: only what its ranks have recorded.
    """
    outcome: str | None = None
    counts = launch is None
    for record in read_records(folder.events):
        kind = record.get("event")
        if kind == "started" and launch is not None:
            counts = record.get("launch") == launch
        if counts and kind in OUTCOMES:
            outcome = kind
    return outcome


def count_events(folder: RunFolder) -> int:
    """Return the number of events so far; those of a launch come after them."""
    return sum(1 for _ in read_records(folder.events))


def record_failure(folder: RunFolder, reason: str, events_before: int = 0, is_cause: bool = True) -> None:
    """Append the event `failed`, unless the run has recorded its end or this failure.

    `events_before`: number of events before this launch, which are not its own. If it has not started the run, the
    caller must hold the run's lock, and a finished run stays finished. `is_cause`: if not, a failure that the run has
    recorded says more than this reason.
    """
    earlier: dict[str, Any] = {}
    last: dict[str, Any] = {}
    has_started = False
    for number, record in enumerate(read_records(folder.events)):
        kind = record.get("event")
        if number < events_before:
            earlier = record if kind in OUTCOMES else earlier
        elif kind in (*OUTCOMES, "fault"):
            last, has_started = record, has_started or kind == "started"
    reasons = [reason]
    if has_started:
        unfinished = ("started", "fault", "failed") if is_cause and reason != NO_END else ("started",)
        is_news = last["event"] in unfinished and last.get("reason") != reason
    else:
        is_news = reason != NO_END and last.get("event") != "failed" and earlier.get("event") != "done"
        if earlier.get("event") == "started":  # a process that could not record its end
            reasons.insert(0, NO_END)
    if not is_news:
        return
    step = (last_record(folder.metrics) or last or earlier).get("step") or 0
    try:
        file = _LineFile(folder.events, say)
    except (OSError, ConfigError) as error:  # must not hide the failure itself
        say(f"the failure is not recorded: {error}")
        return
    for one in reasons:
        file.append(_event("failed", step=step, reason=one))
    file.close()


def record_failed_launch(folder: RunFolder, reason: str, events_before: int, is_cause: bool = True) -> None:
    """Do the same for the command that has started the ranks, after their end."""
    with may_record(folder, events_before) as is_ours:
        if is_ours:
            record_failure(folder, reason, events_before, is_cause)


@contextmanager
def may_record(folder: RunFolder, events_before: int) -> Iterator[bool]:
    """Yield whether the command that has started ranks may add records to the run: its ranks were the last to start
    the run, or no other job holds its lock."""
    records = islice(read_records(folder.events), events_before, None)
    launches = [record.get("launch") for record in records if record.get("event") == "started"]
    if launches and launches[-1] in LAUNCHES:
        yield True
        return
    lock = None
    with suppress(OSError, Z2allError):
        lock = folder.acquire_lock(SILENT_SECONDS)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)
