"""Append-only JSON lines: metrics.jsonl (one flat record a step) and events.jsonl (what happened when)."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from z2all_ds.atomic import write_whole
from z2all_ds.console import say
from z2all_ds.run_folder import RunFolder

OUTCOMES = ("started", "stopped", "requeue", "done")


class RunWriter:
    """Writes both files; used by rank 0 alone. A full disk costs a warning and no record: they wait for room."""

    def __init__(self, folder: RunFolder, warn: Callable[[str], None] = say) -> None:
        self._metrics = _LineFile(folder.metrics, warn)
        self._events = _LineFile(folder.events, warn)

    def metric(self, record: dict[str, Any]) -> None:
        self._metrics.append(record)

    def event(self, kind: str, **details: Any) -> None:
        self._events.append({"time_unix": round(time.time(), 3), "event": kind, **details})

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


class _LineFile:
    """A file that lines are added to. A line is in the file when `append` returns, so a killed run loses none."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        _drop_torn_line(path)
        self._path, self._warn = path, warn
        self._handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        self._waiting = b""

    def append(self, record: dict[str, Any]) -> None:
        was_waiting = bool(self._waiting)
        self._waiting += json.dumps(record, ensure_ascii=False).encode() + b"\n"
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._handle, self._waiting) :]
        except OSError as error:
            if not was_waiting:
                self._warn(f"{self._path} cannot be written ({error.strerror}); its records wait in memory")

    def close(self) -> None:
        os.close(self._handle)


def _drop_torn_line(path: Path) -> None:
    """A line cut off by a crash would run together with the next record."""
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a JSON-lines file; a last line cut off by a crash is passed over."""
    if not path.exists():
        return
    with path.open("rb") as file:  # bytes: the cut may be inside a character
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def drop_metrics_after(path: Path, step: int) -> int:
    """Forgets steps that will be taken again after a resume from `step`. Returns how many were dropped."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        lines = file.readlines()
    kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= step]
    if len(kept) != len(lines):
        write_whole(path, b"".join(kept))
    return len(lines) - len(kept)


def last_outcome(folder: RunFolder) -> str | None:
    """The run's own last word: `started` (it runs, or died), `stopped` (a planned stop), `requeue` (it was asked to
    stop), `done`; None without one."""
    words = [record["event"] for record in read_records(folder.events) if record["event"] in OUTCOMES]
    return words[-1] if words else None
