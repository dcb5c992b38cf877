"""Slices: the pieces of raw files that workers read on their own, and the shape of every reader."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from z2all_ds.corpus.faults import Fault

Row = dict[str, Any]
Advance = Callable[[int], None]
"""Called now and then with the raw bytes read since the last call."""


@dataclass(frozen=True)
class ReadLimits:
    """What no honest file goes beyond."""

    max_record_bytes: int = 64 * 2**20
    max_expansion: float = 200.0
    """Bytes out of a decompressor for each byte in. Text packs ten to one; a bomb a thousand to one."""
    expansion_allowance_bytes: int = 256 * 2**20
    """Below this size nothing is called a bomb."""


@dataclass(frozen=True)
class Slice:
    """A part of one raw file, in the form that is read."""

    path: str
    form: str
    """jsonl, json_array, parquet, txt or lines; auto for a tar whose members are read by their names."""
    start: int = 0
    """First byte (jsonl, lines), row group (parquet) or member (zip)."""
    stop: int | None = None
    """One past the last; None is the end."""
    member: str = ""
    """Name of a zip's first member in this slice."""
    raw_bytes: int = 0
    """On disk, for the progress bar."""


class RowReader(Protocol):
    """Iterate for rows and faults; `where()` names the place of the last one given (`news.json:17`)."""

    def __iter__(self) -> Iterator[Row | Fault]: ...

    def where(self) -> str: ...
