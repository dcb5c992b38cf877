"""Types that all readers share: slices of raw files, limits and rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from z2all_ds.corpus.faults import Fault

Row = dict[str, Any]
Advance = Callable[[int], None]
"""Takes the number of raw bytes read since the last call."""
_MAX_NAME_CHARS = 300


@dataclass(frozen=True)
class ReadLimits:
    """Limits against hostile and broken files."""

    max_record_bytes: int = 64 * 2**20
    max_expansion: float = 200.0
    """Decompressed bytes per compressed byte. Text has a ratio of about 10, a decompression bomb of about 1,000."""
    expansion_allowance_bytes: int = 256 * 2**20
    """Decompressed data below this size is never treated as a bomb."""


@dataclass(frozen=True)
class Slice:
    """A part of one raw file that one worker reads."""

    path: str
    form: str
    """jsonl, json_array, parquet, txt or lines; auto for an archive, whose members each have their own form."""
    start: int = 0
    """First byte (jsonl, lines), row group (parquet) or member (zip)."""
    stop: int | None = None
    """One past the last; None is the end."""
    member: str = ""
    """Name of the first zip member in this slice."""
    raw_bytes: int = 0
    """Bytes on disk, for the progress bar."""


class RowReader(Protocol):
    """Iterates over rows and faults; `where()` returns the position of the last one (`news.json:17`)."""

    def __iter__(self) -> Iterator[Row | Fault]: ...

    def where(self) -> str: ...


def printable(name: str) -> str:
    """Return the name with U+FFFD for each unprintable character, cut to 300 characters."""
    name = "".join(char if char.isprintable() else "\ufffd" for char in name)
    return name if len(name) <= _MAX_NAME_CHARS else f"{name[:_MAX_NAME_CHARS]}..."
