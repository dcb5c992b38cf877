"""Append-only JSON lines: metrics.jsonl (one flat record a step) and events.jsonl (what happened when)."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from z2all_ds.atomic import write_whole
from z2all_ds.run_folder import RunFolder


class RunWriter:
    """Writes both files; used by rank 0 alone."""

    def __init__(self, folder: RunFolder) -> None:
        for path in (folder.metrics, folder.events):
            _drop_torn_line(path)
        # Line-buffered: a record is in the file the moment its step is over, so a killed run loses none.
        self._metrics = folder.metrics.open("a", encoding="utf-8", buffering=1)
        self._events = folder.events.open("a", encoding="utf-8", buffering=1)

    def metric(self, record: dict[str, Any]) -> None:
        self._metrics.write(json.dumps(record, ensure_ascii=False) + "\n")

    def event(self, kind: str, **details: Any) -> None:
        record = {"time_unix": round(time.time(), 3), "event": kind, **details}
        self._events.write(json.dumps(record, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


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
    """The run's own last word: `started` (it runs, or died), `stopped` (a planned stop), `done`; None without one."""
    words = [r["event"] for r in read_records(folder.events) if r["event"] in ("started", "stopped", "done")]
    return words[-1] if words else None
