"""The records that a sink has not had yet, and the file that says how far it has come.

Records have no number that only grows: after a rollback steps are taken again, and metrics.jsonl is cut back. So the
last delivered record is known by its place in the file, its step and its time. Where it is not at its place any more,
the file was cut back before it, and what is new there was written later than it.
"""

import json
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from z2all_ds.base.atomic import write_whole
from z2all_ds.track.tail import LineTail, LocalFile
from z2all_ds.track.writer import lines_from_the_end, parse_record

LONGEST_LINE_BYTES = 1 << 20
"""Looked at before a mark's place to find its line."""
COUNTED_BYTES = 1 << 20


@dataclass(frozen=True)
class Mark:
    """Up to here a sink has the records of a file."""

    offset: int = 0
    """Where the last record's line ends."""
    step: int = 0
    time_unix: float = 0.0


class RecordFollower:
    """Hands out each record of a growing file once, from a mark on."""

    def __init__(self, path: Path, mark: Mark) -> None:
        self.mark = mark
        """Of the last record handed out."""
        self.has_more = False
        """There is something behind what was read last."""
        self._tail = LineTail(LocalFile(path))
        if mark.offset and _is_in_place(path, mark):
            self._tail.skip_to(mark.offset)
            self._known_until = 0.0
        else:
            self._known_until = mark.time_unix

    def read(self) -> list[dict[str, Any]]:
        """One look's; empty where there is nothing new."""
        found: list[dict[str, Any]] = []
        self.has_more = True
        while not found and self.has_more:
            look = self._tail.read()
            self.has_more = not look.is_all
            if look.begins_anew:
                self._known_until = self.mark.time_unix
            offset = self._tail.offset - sum(len(line) + 1 for line in look.lines)
            for line in look.lines:
                offset += len(line) + 1
                record = json.loads(line)
                if record["time_unix"] > self._known_until:
                    self.mark = Mark(offset, record.get("step") or 0, record["time_unix"])
                    found.append(record)
        return found


def _is_in_place(path: Path, mark: Mark) -> bool:
    begin = max(0, mark.offset - LONGEST_LINE_BYTES)
    before = LocalFile(path).read(begin, mark.offset - begin)
    if len(before) != mark.offset - begin or not before.endswith(b"\n"):
        return False
    try:
        record = json.loads(before.splitlines()[-1])
        return (record.get("step") or 0, record["time_unix"]) == (mark.step, mark.time_unix)
    except (ValueError, KeyError, AttributeError):
        return False


@dataclass
class Progress:
    """How far one sink has come; kept as JSON in the run folder."""

    path: Path
    facts: dict[str, Any]
    """What the sink itself wants to know next time."""
    marks: dict[str, dict[str, Mark]]
    """Place (`SinkSettings.place`) -> file (`metrics`, `events`) -> mark."""

    @classmethod
    def load(cls, path: Path) -> "Progress":
        """Where nothing can be read, nothing was delivered."""
        try:
            content = json.loads(path.read_bytes())
            marks = {
                place: {file: Mark(**mark) for file, mark in files.items()} for place, files in content["marks"].items()
            }
            return cls(path, content["facts"], marks)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls(path, {}, {})

    def save(self) -> None:
        marks = {place: {file: asdict(mark) for file, mark in files.items()} for place, files in self.marks.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps({"facts": self.facts, "marks": marks}, indent=1, ensure_ascii=False))

    def mark(self, place: str, file: str) -> Mark:
        return self.marks.get(place, {}).get(file, Mark())


def records_left(metrics: Path, mark: Mark) -> int:
    """Of metrics.jsonl, after the mark. Of a run of days it takes no longer than to read what is counted."""
    if not metrics.exists():
        return 0
    if mark.offset and not _is_in_place(metrics, mark):  # what is new was written later, so stands at the end
        times = (parse_record(line)["time_unix"] for _, line in lines_from_the_end(metrics) if line.endswith(b"\n"))
        return sum(1 for _ in takewhile(lambda moment: moment > mark.time_unix, times))
    with metrics.open("rb") as file:
        file.seek(mark.offset)
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(COUNTED_BYTES), b""))
