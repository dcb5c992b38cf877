"""Records as columns, and columns as tables of sums: what curves are drawn from.

A table has one column per bucket of records and the rows SUM, LEAST, MOST, COUNT over its values that are finite.
Tables can be merged, joined and cut without seeing the records again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from z2all_ds.track.writer import parse_record

SUM, LEAST, MOST, COUNT = range(4)
Numbers = npt.NDArray[np.float64]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """A record, or None where the line is none."""
    try:
        record: Any = parse_record(line)
    except ValueError:  # also what is not UTF-8
        return None
    return record if isinstance(record, dict) else None


def columns_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Numbers]:
    """Every name's values, NaN where a record has none. What is no number is left out."""
    # Most records of a run have the same names in the same order: as a matrix they cost a third of a look-up each.
    alike: dict[tuple[str, ...], list[int]] = {}
    for number, record in enumerate(records):
        alike.setdefault(tuple(record), []).append(number)
    columns: dict[str, Numbers] = {}
    for names, numbers in alike.items():
        matrix = _matrix([list(records[number].values()) for number in numbers], len(names))
        for name, values in zip(names, matrix.T, strict=True):
            if name not in columns:
                columns[name] = np.full(len(records), np.nan)
            columns[name][numbers] = values
    return {name: column for name, column in columns.items() if np.isfinite(column).any()}


def _matrix(rows: list[list[Any]], width: int) -> Numbers:
    try:
        matrix = np.array(rows, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        matrix = np.empty(0)
    if matrix.shape == (len(rows), width):
        return matrix
    return np.array([[_number(value) for value in row] for row in rows], dtype=np.float64).reshape(len(rows), width)


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else np.nan
    except OverflowError:
        return np.nan


def table_of(values: Numbers, starts: npt.NDArray[np.int64]) -> Numbers:
    """The table of a column whose buckets begin at `starts`."""
    finite = np.isfinite(values)
    return np.stack(
        [
            np.add.reduceat(np.where(finite, values, 0.0), starts),
            np.minimum.reduceat(np.where(finite, values, np.inf), starts),
            np.maximum.reduceat(np.where(finite, values, -np.inf), starts),
            np.add.reduceat(finite.astype(np.float64), starts),
        ]
    )


def empty_table(buckets: int) -> Numbers:
    table = np.zeros((4, buckets))
    table[LEAST], table[MOST] = np.inf, -np.inf
    return table


def merged(table: Numbers, starts: npt.NDArray[np.int64]) -> Numbers:
    """Fewer columns: each new one takes those from its start to the next one's."""
    return np.stack(
        [
            np.add.reduceat(table[SUM], starts),
            np.minimum.reduceat(table[LEAST], starts),
            np.maximum.reduceat(table[MOST], starts),
            np.add.reduceat(table[COUNT], starts),
        ]
    )


def mean_of(table: Numbers) -> Numbers:
    """NaN where a bucket has no value."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(table[COUNT] > 0, table[SUM] / table[COUNT], np.nan))


class Buckets:
    """Tables of any number of records in a fixed number of buckets: when all are full, each takes twice as many."""

    def __init__(self, most_buckets: int = 8192) -> None:
        self.most_buckets = most_buckets
        self.width = 1
        """Records in a bucket that is full."""
        self.records = 0
        self._tables: dict[str, Numbers] = {}
        self._weights = np.zeros(most_buckets)

    @property
    def names(self) -> list[str]:
        return list(self._tables)

    @property
    def used(self) -> int:
        """Buckets with a record in them."""
        return -(-self.records // self.width)

    def add(self, columns: Mapping[str, Numbers], records: int, weights: Numbers | None = None) -> None:
        """The next records, as columns of that length. `weights`: how many each stands for, if not for itself alone."""
        if records == 0:
            return
        while (self.records + records - 1) // self.width >= self.most_buckets:
            self._double_width()
        buckets = np.arange(self.records, self.records + records) // self.width
        first, end = int(buckets[0]), int(buckets[-1]) + 1
        starts = np.flatnonzero(np.diff(buckets, prepend=-1))
        for name, values in columns.items():
            part, new = self._table(name, end)[:, first:end], table_of(values, starts)
            part[SUM] += new[SUM]
            np.minimum(part[LEAST], new[LEAST], out=part[LEAST])
            np.maximum(part[MOST], new[MOST], out=part[MOST])
            part[COUNT] += new[COUNT]
        self._weights[first:end] += np.add.reduceat(np.ones(records) if weights is None else weights, starts)
        self.records += records

    def table(self, name: str) -> Numbers:
        """A copy, as long as there are buckets in use; empty columns where the name was not seen."""
        table = empty_table(self.used)
        kept = self._tables.get(name)
        if kept is not None:
            length = min(self.used, kept.shape[1])
            table[:, :length] = kept[:, :length]
        return table

    def weights(self) -> Numbers:
        """Records that each bucket stands for."""
        return self._weights[: self.used].copy()

    def total(self, name: str) -> float:
        kept = self._tables.get(name)
        return 0.0 if kept is None else float(kept[SUM].sum())

    def _table(self, name: str, needed: int) -> Numbers:
        table = self._tables.get(name)
        if table is None or table.shape[1] < needed:
            size = min(self.most_buckets, max(64, 1 << (needed - 1).bit_length()))
            grown = empty_table(size)
            if table is not None:
                grown[:, : table.shape[1]] = table
            self._tables[name] = table = grown
        return table

    def _double_width(self) -> None:
        for table in self._tables.values():
            halved = merged(table, np.arange(0, table.shape[1], 2))
            table[:] = empty_table(table.shape[1])
            table[:, : halved.shape[1]] = halved
        weights = np.add.reduceat(self._weights, np.arange(0, self.most_buckets, 2))
        self._weights = np.append(weights, np.zeros(self.most_buckets - len(weights)))
        self.width *= 2
