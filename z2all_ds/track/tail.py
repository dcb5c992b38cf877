"""Incremental reading of a JSON-lines file that grows.

metrics.jsonl is also truncated to an earlier step when a run goes back or restarts. By the next read it may be longer
than before, so its size shows nothing. Instead, the last bytes already read are compared: a record contains the time
when it was written, so different bytes mean that the file was truncated and must be read from its beginning.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from z2all_ds.track.files import LONGEST_LINE_BYTES, Files, LinkedFiles
from z2all_ds.track.writer import parse_line

MARK_BYTES = 256
"""Compared before each read; they contain a record's last fields and its time."""
STEP_BYTES = 4 << 20


@dataclass(frozen=True)
class NewLines:
    """Result of one read."""

    lines: list[bytes]
    """Whole lines without their line ends."""
    is_restarted: bool
    """The file was truncated since the last read; these are its first lines."""
    is_all: bool
    """There is nothing more to read now."""


class LineTail:
    """Reads a file from its beginning, or from the offset given to `skip_to`."""

    def __init__(self, path: Path | str, files: Files | None = None) -> None:
        self._files, self._path = files or LinkedFiles(), str(path)
        self.offset = 0
        """Bytes of whole lines read so far."""
        self._mark = b""
        self._is_skipping = False
        """The offset is inside a line that is too long."""

    def skip_to(self, offset: int) -> None:
        """Continue at `offset`, which must be the beginning of a line."""
        self.offset, self._is_skipping = offset, False
        self._mark = self._files.read(self._path, max(0, offset - MARK_BYTES), min(offset, MARK_BYTES))

    def read(self, most_bytes: int = STEP_BYTES) -> NewLines:
        """Read the next lines. A line longer than `most_bytes` is read whole, in several steps; of one longer than
        LONGEST_LINE_BYTES, an empty line is returned, after calls that return none."""
        mark = self._files.read(self._path, self.offset - len(self._mark), len(self._mark))
        is_restarted = mark != self._mark
        if is_restarted:
            self.offset, self._mark, self._is_skipping = 0, b"", False
        size = self._files.size(self._path)
        content = self._files.read(self._path, self.offset, most_bytes)
        end = content.rfind(b"\n") + 1
        while not end and not self._is_skipping and len(content) <= LONGEST_LINE_BYTES:
            # Doubled, for linear time.
            more = self._files.read(self._path, self.offset + len(content), max(most_bytes, len(content)))
            if not more:
                break
            end = len(content) + more.rfind(b"\n") + 1 if b"\n" in more else 0
            content += more
        is_cut = self._is_skipping or (not end and len(content) > LONGEST_LINE_BYTES)
        if is_cut:
            end = content.find(b"\n") if end else len(content)  # the line end is the empty line of the next call
            self._is_skipping = b"\n" not in content
        self.offset += end
        self._mark = (self._mark + content[:end])[-MARK_BYTES:]
        is_all = self.offset >= size if is_cut else self.offset + len(content) - end >= size
        return NewLines([] if is_cut else content[:end].splitlines(), is_restarted, is_all)


class RecordLog:
    """A JSON-lines file whose records are passed to `add` as they appear; `reset` is called when it was truncated."""

    def __init__(self, files: Files, path: str) -> None:
        self._tail = LineTail(path, files)
        self._stat: list[float] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all records; also called once at the beginning."""

    def add(self, record: dict[str, Any] | None) -> None:
        """Take one record; None if the line is not one."""

    def update(self, stat: list[float]) -> bool:
        """Read new records, given the file's current stat. Return whether there is more to read."""
        if stat == self._stat:
            return False
        new = self._tail.read()
        if new.is_restarted:
            self.reset()
        for line in new.lines:
            self.add(parse_line(line))
        self._stat = stat if new.is_all else None
        return not new.is_all
