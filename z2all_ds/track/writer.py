"""JSON lines that are added to: metrics.jsonl (one flat record a step), events.jsonl (what happened when), health.jsonl
(what steps cost each rank). Whatever their length, they are opened and cut back by their ends alone."""

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
    """Writes all files; used by rank 0 alone. A full disk costs a warning and no record: they wait for room."""

    def __init__(self, folder: RunFolder, warn: Callable[[str], None] = say) -> None:
        self._warn = warn
        self._metrics = _LineFile(folder.metrics, warn)
        self._events = _LineFile(folder.events, warn)
        self._health = _LineFile(folder.health, warn)

    def metric(self, record: dict[str, Any]) -> None:
        self._metrics.append(record)

    def event(self, kind: str, **details: Any) -> None:
        self._events.append({"time_unix": round(time.time(), 3), "event": kind, **details})

    def health(self, step: int, **figures_by_rank: list[float]) -> None:
        self._health.append({"step": step, "time_unix": round(time.time(), 3), **figures_by_rank})

    def drop_metrics_after(self, step: int) -> int:
        """Forgets steps that will be taken again. Returns how many were dropped."""
        self._metrics.close()
        dropped = drop_metrics_after(self._metrics.path, step)
        self._metrics = _LineFile(self._metrics.path, self._warn)
        return dropped

    def close(self) -> None:
        for file in (self._metrics, self._events, self._health):
            file.close()


class _LineFile:
    """A file that lines are added to. A line is in the file when `append` returns, so a killed run loses none."""

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
    """A line cut off by a crash would run together with the next record."""
    if path.exists():
        size = path.stat().st_size
        end = next((start + len(line) for start, line in lines_from_the_end(path) if line.endswith(b"\n")), 0)
        if end != size:
            os.truncate(path, end)


def lines_from_the_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each with its place; the last line, which may be cut off, comes first."""
    with path.open("rb") as file:
        begin = file.seek(0, os.SEEK_END)
        content = b""
        """From `begin` to the beginning of the last line given."""
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
    """Records of a JSON-lines file; a last line cut off by a crash is passed over."""
    if not path.exists():
        return
    with path.open("rb") as file:  # bytes: the cut may be inside a character
        for line in file:
            if line.endswith(b"\n"):
                yield parse_record(line)


def last_record(path: Path) -> dict[str, Any] | None:
    """Found from the file's end."""
    lines = lines_from_the_end(path) if path.exists() else iter(())
    return next((parse_record(line) for _, line in lines if line.endswith(b"\n")), None)


def parse_record(line: bytes) -> dict[str, Any]:
    """One line; a ValueError where it is none."""
    try:
        record: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError:  # Infinity and NaN, which Python writes and JSON does not have
        record = json.loads(line)
    return record


def drop_metrics_after(path: Path, step: int) -> int:
    """Forgets steps that will be taken again after a resume from `step`. Returns how many were dropped."""
    if not path.exists():
        return 0
    dropped, size = 0, path.stat().st_size
    end = size
    for start, line in lines_from_the_end(path):  # steps only grow
        if line.endswith(b"\n") and parse_record(line)["step"] <= step:
            break
        dropped, end = dropped + 1, start
    if end != size:
        os.truncate(path, end)
    return dropped


def last_outcome(folder: RunFolder) -> str | None:
    """The run's own last word: `started` (it runs, or died), `stopped` (a planned stop), `requeue` (it was asked to
    stop), `done`; None without one."""
    words = [record["event"] for record in read_records(folder.events) if record["event"] in OUTCOMES]
    return words[-1] if words else None
