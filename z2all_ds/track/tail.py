"""What was added to a JSON-lines file since the last look, read in steps.

metrics.jsonl grows, and is cut back to an earlier step where a run goes back or is started again. By the next look it
may be longer than before all the same, so its size tells nothing: the last bytes that were read are looked at again. A
record holds the moment it was written at, so other bytes there mean another history, which is read from its beginning.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

MARK_BYTES = 256
"""Of the lines already read, looked at again: a record's last fields and its time are among them."""
STEP_BYTES = 4 << 20


class Source(Protocol):
    """A file that others write to, here or elsewhere."""

    def size(self) -> int:
        """0 where it is missing."""

    def read(self, offset: int, length: int) -> bytes:
        """Fewer bytes where the file ends."""


@dataclass(frozen=True)
class LocalFile:
    """Opened anew for every look: the file may have been put in another's place."""

    path: Path

    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def read(self, offset: int, length: int) -> bytes:
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(descriptor, length, offset)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class NewLines:
    """One look's."""

    lines: list[bytes]
    """Whole ones, without their ends."""
    begins_anew: bool
    """The file has another history than what was read before: these are its first lines."""
    is_all: bool
    """There is nothing more to read now."""


class LineTail:
    """Follows one file from its beginning, or from where `skip_to` puts it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.offset = 0
        """Bytes of whole lines read so far."""
        self._mark = b""

    def skip_to(self, offset: int) -> None:
        """Goes on from here: the beginning of a line."""
        self.offset = offset
        self._mark = self._source.read(max(0, offset - MARK_BYTES), min(offset, MARK_BYTES))

    def read(self, most_bytes: int = STEP_BYTES) -> NewLines:
        """A line longer than `most_bytes` is read whole, in as many looks as it takes."""
        begins_anew = not self._is_where_it_was()
        if begins_anew:
            self.offset, self._mark = 0, b""
        size = self._source.size()
        content = self._source.read(self.offset, most_bytes)
        while b"\n" not in content and self.offset + len(content) < size:
            more = self._source.read(self.offset + len(content), most_bytes)
            if not more:
                break
            content += more
        end = content.rfind(b"\n") + 1
        self.offset += end
        self._mark = (self._mark + content[:end])[-MARK_BYTES:]
        return NewLines(content[:end].splitlines(), begins_anew, is_all=self.offset + len(content) - end >= size)

    def _is_where_it_was(self) -> bool:
        return self._source.read(self.offset - len(self._mark), len(self._mark)) == self._mark
