"""JSON-lines files of a run: metrics.jsonl (one flat record per step), events.jsonl and health.jsonl (cost of steps per
rank). They are opened and truncated by reading only their ends, whatever their length."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from z2all_ds.base.console import say
from z2all_ds.base.run_folder import RunFolder

OUTCOMES = ("started", "stopped", "requeue", "done")
TAIL_BYTES = 1 << 16


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
        self._events.append({"time_unix": round(time.time(), 3), "event": kind, **details})

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


class _LineFile:
    """A file to append lines to. A line is in the file when `append` returns, so a killed run loses none."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        _drop_torn_line(path)
        self.path, self._warn = path, warn
        self._handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
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
    if path.exists():
        end = next((start + len(line) for start, line in _lines_from_the_end(path) if line.endswith(b"\n")), 0)
        if end != path.stat().st_size:
            os.truncate(path, end)


def _lines_from_the_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield offset and content of each line, the last one first, which may be cut off."""
    with path.open("rb") as file:
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


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON-lines file; skip a last line that a crash has cut off."""
    if not path.exists():
        return
    with path.open("rb") as file:  # bytes: the cut may be inside a character
        for line in file:
            if line.endswith(b"\n"):
                yield parse_record(line)


def last_record(path: Path) -> dict[str, Any] | None:
    """Return the last whole record, found from the file's end."""
    lines = _lines_from_the_end(path) if path.exists() else iter(())
    return next((parse_record(line) for _, line in lines if line.endswith(b"\n")), None)


def parse_record(line: bytes) -> dict[str, Any]:
    """Parse one line; raise ValueError if it is not JSON."""
    try:
        record: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError:  # Infinity and NaN, which Python writes although JSON does not have them
        record = json.loads(line)
    return record


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Parse one line; return None if it is not a record."""
    try:
        record: Any = parse_record(line)
    except ValueError:  # also raised for invalid UTF-8
        return None
    return record if isinstance(record, dict) else None


def drop_metrics_after(path: Path, step: int) -> int:
    """Drop records of steps that will be repeated after a resume from `step`. Return their number."""
    if not path.exists():
        return 0
    dropped, size = 0, path.stat().st_size
    end = size
    for start, line in _lines_from_the_end(path):  # steps only grow
        if line.endswith(b"\n") and parse_record(line)["step"] <= step:
            break
        dropped, end = dropped + 1, start
    if end != size:
        os.truncate(path, end)
    return dropped


def last_outcome(folder: RunFolder) -> str | None:
    """Return the last outcome that the run has recorded, None if there is none.

    `started`: it runs, or died. `stopped`: a planned stop. `requeue`: a requested stop. `done`: finished.
    """
    outcomes = [record["event"] for record in read_records(folder.events) if record["event"] in OUTCOMES]
    return outcomes[-1] if outcomes else None
