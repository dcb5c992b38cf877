"""The content of a metrics file since it was last truncated: its buckets, and the byte offsets of its steps."""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from z2all_ds.track.fields import AXES, PROBE_PREFIX
from z2all_ds.track.goodput import counted_seconds
from z2all_ds.track.tables import Buckets, Numbers, columns_of
from z2all_ds.track.writer import parse_line

STEP_BYTES = 1 << 20
"""Read and parsed at a time, in about 20 ms."""
RARE_FIELDS = ("validation_loss", PROBE_PREFIX)
"""Beginnings of fields that few records have. A sample would miss them, so it contains all of those records."""


class Index:
    """Offsets in the file, each with the step, tokens and time of its record."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self._columns: dict[str, list[float]] = {name: [] for name in AXES.values()}

    def add(self, offset: int, record: dict[str, Any]) -> None:
        values = [record.get(name) for name in AXES.values()]
        if all(isinstance(value, int | float) for value in values):
            self.offsets.append(offset)
            for column, value in zip(self._columns.values(), values, strict=True):
                column.append(float(value))  # type: ignore[arg-type]

    def range(self, name: str, low: float, high: float, size: int) -> tuple[int, int]:
        """Return the first and last byte of the part that may contain records from `low` to `high`."""
        column = self._columns[name]
        first, end = bisect_right(column, low) - 1, bisect_left(column, high)
        begin = self.offsets[first] if first >= 0 else 0
        return begin, self.offsets[end] if end < len(self.offsets) else size


class History:
    """All records of the file, or a sample of them; a truncated file gets a new history."""

    def __init__(self, is_sample: bool) -> None:
        self.is_sample = is_sample
        self.buckets, self.index = Buckets(), Index()
        self.records, self.unparsable = 0, 0
        self._last_step = np.nan
        self.counted_seconds = 0.0
        """For the goodput; not known of a sample."""
        self.probes: dict[str, tuple[float, float]] = {}
        """Step and last value of each probe."""

    @classmethod
    def sample(cls, lines: Mapping[int, bytes]) -> "History":
        """Return a sample of the file made of these lines, by their offsets."""
        sample = cls(is_sample=True)
        parsed = [(offset, parse_line(line)) for offset, line in sorted(lines.items())]
        records = [(offset, record) for offset, record in parsed if record is not None]
        for offset, record in records:
            sample.index.add(offset, record)
        columns = columns_of([record for _, record in records])
        sample._keep(columns, len(records))
        sample.probes = last_probes(columns)
        sample.records = len(records)
        return sample

    def add(self, offset: int, lines: Sequence[bytes], lock: threading.Lock) -> list[dict[str, Any]]:
        """Add the next lines, the first of which begins at `offset`, and return their records.

        The lock is taken after parsing, so that requests are answered meanwhile.
        """
        parsed = [parse_line(line) for line in lines]
        records = [record for record in parsed if record is not None]
        columns, is_kept = columns_of(records), np.zeros(len(records), dtype=bool)
        stride = self._stride((sum(map(len, lines)) + len(lines)) / max(1, len(lines)))
        is_kept[-self.records % stride :: stride] = True
        for name, column in columns.items() if stride > 1 else ():
            if name.startswith(RARE_FIELDS):
                is_kept |= np.isfinite(column)
        columns = {name: column[is_kept] for name, column in columns.items()}
        with lock:
            self.unparsable += len(parsed) - len(records)
            if records and (not self.index.offsets or offset - self.index.offsets[-1] >= STEP_BYTES // 2):
                self.index.add(offset, records[0])
            self._keep(columns, int(is_kept.sum()))
            self.records += len(records)
            self.probes |= last_probes(columns)
            self.counted_seconds += sum(map(counted_seconds, records))
        return records

    def _keep(self, columns: Mapping[str, Numbers], rows: int) -> None:
        """Add records to the buckets. A record of a sample stands for all steps since the previous one."""
        if not self.is_sample:
            self.buckets.add(columns, rows)
            return
        steps = columns.get("step", np.full(rows, np.nan))
        gaps = np.diff(steps, prepend=self._last_step)
        self.buckets.add(columns, rows, np.where(gaps > 1, gaps, 1.0))
        self._last_step = steps[np.isfinite(steps)][-1] if np.isfinite(steps).any() else self._last_step

    def _stride(self, record_bytes: float) -> int:
        """Return the distance of records to keep: a sample stays as sparse as it is."""
        if not self.is_sample or not self.index.offsets:
            return 1
        return max(1, round(self.index.offsets[-1] / len(self.index.offsets) / max(1.0, record_bytes)))


def last_probes(columns: Mapping[str, Numbers]) -> dict[str, tuple[float, float]]:
    """Return step and value of the last answer to each probe."""
    found = {}
    for name in [name for name in columns if name.startswith(PROBE_PREFIX) and "step" in columns]:
        known = np.flatnonzero(np.isfinite(columns[name]))
        if known.size:
            last = known[-1]
            found[name.removeprefix(PROBE_PREFIX)] = (float(columns["step"][last]), float(columns[name][last]))
    return found
