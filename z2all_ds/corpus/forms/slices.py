"""What all readers share: slices of raw files, limits, rows, and names that are safe to print."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from z2all_ds.corpus.faults import Fault

Row = dict[str, Any]
Advance = Callable[[int], None]
"""Takes the number of raw bytes read since the last call."""
_LONGEST_NAME = 300


@dataclass(frozen=True)
class ReadLimits:
    """Limits against hostile and broken files."""

    max_record_bytes: int = 64 * 2**20
    max_expansion: float = 200.0
    """Bytes out of a decompressor for each byte in. Text packs ten to one; a bomb a thousand to one."""
    expansion_allowance_bytes: int = 256 * 2**20
    """Below this size nothing is called a bomb."""


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
    """Name of a zip's first member in this slice."""
    raw_bytes: int = 0
    """On disk, for the progress bar."""


class RowReader(Protocol):
    """Iterates over rows and faults; `where()` names the place of the last one (`news.json:17`)."""

    def __iter__(self) -> Iterator[Row | Fault]: ...

    def where(self) -> str: ...


def harmless(name: str) -> str:
    """Returns the name with U+FFFD for each character that does not print, cut to 300 characters."""
    name = "".join(char if char.isprintable() else "\ufffd" for char in name)
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
