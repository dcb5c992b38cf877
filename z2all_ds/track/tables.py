"""Records as columns, and columns in a bounded number of buckets: the data that curves are drawn from.

A table has one column per bucket of records and the rows SUM, MIN, MAX, COUNT over its finite values. Tables can be
merged, joined and cut without the records.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

SUM, MIN, MAX, COUNT = range(4)
Numbers = npt.NDArray[np.float64]


def columns_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Numbers]:
    """Return the values of every field, NaN if a record has none. Fields without numbers are left out."""
    # Most records of a run have the same fields in the same order; as a matrix they take a third of the time.
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
    """Return the table of a column whose buckets begin at `starts`."""
    finite = np.isfinite(values)
    rows = [np.where(finite, values, missing) for missing in (0.0, np.inf, -np.inf)]
    return merge_buckets(np.stack([*rows, finite.astype(np.float64)]), starts)


def merge_buckets(table: Numbers, starts: npt.NDArray[np.int64]) -> Numbers:
    """Return a table with fewer buckets, which begin at `starts`."""
    reductions = (np.add, np.minimum, np.maximum, np.add)
    return np.stack([reduce.reduceat(row, starts) for reduce, row in zip(reductions, table, strict=True)])


def empty_table(buckets: int) -> Numbers:
    table = np.zeros((4, buckets))
    table[MIN], table[MAX] = np.inf, -np.inf
    return table


def mean_of(table: Numbers) -> Numbers:
    """Return the mean of each bucket, NaN if it has no value."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(table[COUNT] > 0, table[SUM] / table[COUNT], np.nan))


class Buckets:
    """Tables of any number of records in a fixed number of buckets; when all are full, their width doubles."""

    def __init__(self, most_buckets: int = 8192) -> None:
        self.most_buckets = most_buckets
        self.width = 1
        """Records per full bucket."""
        self.records = 0
        self._tables: dict[str, Numbers] = {}
        self._weights = np.zeros(most_buckets)

    @property
    def names(self) -> list[str]:
        return list(self._tables)

    @property
    def used(self) -> int:
        """Number of buckets that contain a record."""
        return -(-self.records // self.width)

    def add(self, columns: Mapping[str, Numbers], records: int, weights: Numbers | None = None) -> None:
        """Add records as columns of that length. `weights`: how many records each stands for, by default one."""
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
            np.minimum(part[MIN], new[MIN], out=part[MIN])
            np.maximum(part[MAX], new[MAX], out=part[MAX])
            part[COUNT] += new[COUNT]
        self._weights[first:end] += np.add.reduceat(np.ones(records) if weights is None else weights, starts)
        self.records += records

    def table(self, name: str) -> Numbers:
        """Return a copy of the used buckets; empty ones for an unknown field."""
        table = empty_table(self.used)
        kept = self._tables.get(name)
        if kept is not None:
            length = min(self.used, kept.shape[1])
            table[:, :length] = kept[:, :length]
        return table

    def weights(self) -> Numbers:
        """Return how many records each bucket stands for."""
        return self._weights[: self.used].copy()

    def total(self, name: str) -> float:
        kept = self._tables.get(name)
        return 0.0 if kept is None else float(kept[SUM].sum())

    def _table(self, name: str, needed: int) -> Numbers:
        table = self._tables.get(name)
        if table is None or table.shape[1] < needed:
            grown = empty_table(min(self.most_buckets, max(64, 1 << (needed - 1).bit_length())))
            if table is not None:
                grown[:, : table.shape[1]] = table
            self._tables[name] = table = grown
        return table

    def _double_width(self) -> None:
        for table in self._tables.values():
            halved = merge_buckets(table, np.arange(0, table.shape[1], 2))
            table[:] = empty_table(table.shape[1])
            table[:, : halved.shape[1]] = halved
        weights = np.add.reduceat(self._weights, np.arange(0, self.most_buckets, 2))
        self._weights = np.append(weights, np.zeros(self.most_buckets - len(weights)))
        self.width *= 2
