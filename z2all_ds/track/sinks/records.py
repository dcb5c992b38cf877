"""The records that a sink does not have yet, and the file that says how far it has come.

Records have no number that only grows: after a rollback steps are repeated, and metrics.jsonl is cut back. So the last
delivered record is identified by its place in the file, its step and its time. If another record is at that place, the
file was cut back before it, and its new records have a later time.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from z2all_ds.base.atomic import write_whole
from z2all_ds.track.tail import LineTail, LocalFile
from z2all_ds.track.writer import parse_record

LONGEST_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Mark:
    """A sink has the records of a file up to this one."""

    offset: int = 0
    """Where the record's line ends."""
    step: int = 0
    time_unix: float = 0.0


class RecordFollower:
    """Returns each record of a growing file once, starting after a mark."""

    def __init__(self, path: Path, mark: Mark) -> None:
        self.mark = mark
        """Of the last record returned."""
        self.has_more = False
        """The file has more than what was read last."""
        self._tail = LineTail(LocalFile(path))
        self._known_until = mark.time_unix
        if mark.offset and _is_in_place(path, mark):
            self._tail.skip_to(mark.offset)
            self._known_until = 0.0

    def read(self) -> list[dict[str, Any]]:
        """Returns the next records; none if there is nothing new."""
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
                record = parse_record(line)
                if record["time_unix"] > self._known_until:
                    self.mark = Mark(offset, record.get("step") or 0, record["time_unix"])
                    found.append(record)
        return found


def _is_in_place(path: Path, mark: Mark) -> bool:
    begin = max(0, mark.offset - LONGEST_LINE_BYTES)
    before = LocalFile(path).read(begin, mark.offset - begin)
    try:
        record = parse_record(before.splitlines()[-1])
        found = Mark(begin + len(before), record.get("step") or 0, record["time_unix"])
    except (ValueError, KeyError, AttributeError, IndexError):
        return False
    return found == mark and before.endswith(b"\n")


@dataclass
class Progress:
    """How far one sink has come; kept as JSON in the run folder."""

    path: Path
    facts: dict[str, Any]
    """What the sink itself needs next time."""
    marks: dict[str, dict[str, Mark]]
    """Place (`SinkSettings.place`) -> file (`metrics`, `events`) -> mark."""

    @classmethod
    def load(cls, path: Path) -> "Progress":
        """Returns an empty one if the file cannot be read."""
        try:
            content = json.loads(path.read_bytes())
            marks = {
                place: {file: Mark(**mark) for file, mark in files.items()} for place, files in content["marks"].items()
            }
            return cls(path, content["facts"], marks)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls(path, {}, {})

    def save(self) -> None:
        content = {"facts": self.facts, "marks": self.marks}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(content, default=asdict, indent=1, ensure_ascii=False))

    def save_marks(self, place: str, **marks: Mark) -> None:
        self.marks[place] = marks
        self.save()

    def mark(self, place: str, file: str) -> Mark:
        return self.marks.get(place, {}).get(file, Mark())
