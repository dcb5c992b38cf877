"""Records that a sink does not have yet, and the file with its progress.

Steps are repeated after a rollback, and metrics.jsonl is truncated. So the last delivered record is identified by its
offset in the file, its step and its time. If another record is at that offset, the file was truncated before it, and
its new records have a later time.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from z2all_ds.base.atomic import write_whole
from z2all_ds.base.json_text import load_json
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.track.files import LinkedFiles
from z2all_ds.track.tail import LineTail
from z2all_ds.track.writer import parse_line, parse_record

LONGEST_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Mark:
    """The last record of a file that a sink has."""

    offset: int = 0
    """End of the record's line."""
    step: int = 0
    time_unix: float = 0.0


class RecordFollower:
    """Returns each record of a growing file once, starting after a mark."""

    def __init__(self, path: Path, mark: Mark) -> None:
        self.mark = mark
        """Mark of the last record returned."""
        self.has_more = False
        """The file has more records than the last call returned."""
        self._tail = LineTail(path)
        self._known_until = mark.time_unix
        if mark.offset and _is_unchanged(path, mark):
            self._tail.skip_to(mark.offset)
            self._known_until = 0.0

    def read(self) -> list[dict[str, Any]]:
        """Return the next records; none if there is nothing new."""
        found: list[dict[str, Any]] = []
        self.has_more = True
        while not found and self.has_more:
            new = self._tail.read()
            self.has_more = not new.is_all
            if new.is_restarted:
                self._known_until = self.mark.time_unix
            offset = self._tail.offset - sum(len(line) + 1 for line in new.lines)
            for line in new.lines:
                offset += len(line) + 1
                record = parse_line(line) or {}  # a damaged line is skipped
                written = record.get("time_unix")
                if isinstance(written, int | float) and written > self._known_until:
                    self.mark = Mark(offset, record.get("step") or 0, written)
                    found.append(record)
        return found


def _is_unchanged(path: Path, mark: Mark) -> bool:
    """Return whether the file still has the marked record at its offset."""
    begin = max(0, mark.offset - LONGEST_LINE_BYTES)
    before = LinkedFiles().read(str(path), begin, mark.offset - begin)
    try:
        record = parse_record(before.splitlines()[-1])
        found = Mark(begin + len(before), record.get("step") or 0, record["time_unix"])
    except (ValueError, KeyError, AttributeError, IndexError):
        return False
    return found == mark and before.endswith(b"\n")


@dataclass
class Progress:
    """Progress of one sink; saved as JSON in the run folder."""

    path: Path
    facts: dict[str, Any]
    """Data that the sink itself needs next time."""
    marks: dict[str, dict[str, Mark]]
    """By destination (`SinkSettings.destination`) and file (`metrics`, `events`)."""

    @classmethod
    def load(cls, path: Path) -> "Progress":
        """Read the file; the progress is empty if that fails."""
        try:
            content = load_json(read_regular(path))
            marks = {
                destination: {file: Mark(**mark) for file, mark in files.items()}
                for destination, files in content["marks"].items()
            }
            return cls(path, content["facts"], marks)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls(path, {}, {})

    def save(self) -> None:
        content = {"facts": self.facts, "marks": self.marks}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(content, default=asdict, indent=1, ensure_ascii=False))

    def save_marks(self, destination: str, **marks: Mark) -> None:
        self.marks[destination] = marks
        self.save()

    def mark(self, destination: str, file: str) -> Mark:
        return self.marks.get(destination, {}).get(file, Mark())
