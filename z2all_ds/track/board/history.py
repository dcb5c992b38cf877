"""What is known of one history of a metrics file: its buckets, and which bytes hold which steps."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from z2all_ds.track.fields import PROBE_PREFIX
from z2all_ds.track.tables import Buckets, Numbers, columns_of, parse_line

STEP_BYTES = 1 << 20
"""Read and parsed at a time: some 20 ms of a processor."""
INDEXED = ("step", "tokens_seen", "time_unix")
RARE_FIELDS = ("validation_loss", PROBE_PREFIX)
"""How fields begin that few records have: a sample would miss them, so it takes all of those records."""


class Index:
    """Which bytes hold which steps: places in the file, each with what its record says."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self._columns: dict[str, list[float]] = {name: [] for name in INDEXED}

    def add(self, offset: int, record: dict[str, Any]) -> None:
        values = {name: record.get(name) for name in INDEXED}
        if all(isinstance(value, int | float) for value in values.values()):
            self.offsets.append(offset)
            for name, value in values.items():
                self._columns[name].append(float(value))  # type: ignore[arg-type]

    def part(self, name: str, low: float, high: float, size: int) -> tuple[int, int]:
        """First and last byte of what may hold records from `low` to `high`."""
        column = self._columns[name]
        first, end = bisect_right(column, low) - 1, bisect_left(column, high)
        begin = self.offsets[first] if first >= 0 else 0
        return begin, self.offsets[end] if end < len(self.offsets) else size


class History:
    """What is known of one history of the file; another begins where the file is cut back."""

    def __init__(self, is_sample: bool) -> None:
        self.is_sample = is_sample
        self.buckets, self.index = Buckets(), Index()
        self.records, self.unparsable = 0, 0
        self.last_step = np.nan
        """Of the records that were kept."""
        self.untaken_seconds = 0.0
        """Of steps that the guard left out."""
        self.probes: dict[str, tuple[float, float]] = {}
        """Step and value of the last answer to each."""

    def add(self, offset: int, batch: "Batch") -> None:
        """The next records, the first of which begins at this byte."""
        self.unparsable += batch.unparsable
        if not batch.records:
            return
        if not self.index.offsets or offset - self.index.offsets[-1] >= STEP_BYTES // 2:
            self.index.add(offset, batch.records[0])
        self.keep(batch.columns, batch.rows)
        self.records += len(batch.records)
        self.probes |= batch.probes
        self.untaken_seconds += sum(_counted(record) for record in batch.records if record.get("step_taken") is False)

    def keep(self, columns: Mapping[str, Numbers], rows: int) -> None:
        """The next records that curves are drawn from. One of a sample stands for those since the one before it, of
        which there is one a step."""
        if not self.is_sample:
            self.buckets.add(columns, rows)
            return
        steps = columns.get("step", np.full(rows, np.nan))
        gaps = np.diff(steps, prepend=self.last_step)
        self.buckets.add(columns, rows, np.where(gaps > 1, gaps, 1.0))
        self.last_step = steps[np.isfinite(steps)][-1] if np.isfinite(steps).any() else self.last_step

    def stride(self, record_bytes: float) -> int:
        """Records from one that is kept to the next: a sample goes on as sparse as it is, or its end would crowd out
        the rest."""
        if not self.is_sample or not self.index.offsets:
            return 1
        return max(1, round(self.index.offsets[-1] / len(self.index.offsets) / max(1.0, record_bytes)))


class Batch:
    """Lines made ready to be added, while requests are still answered from what there was."""

    def __init__(self, lines: Sequence[bytes], history: History) -> None:
        parsed = [parse_line(line) for line in lines]
        self.records = [record for record in parsed if record is not None]
        self.unparsable = len(parsed) - len(self.records)
        stride = history.stride((sum(map(len, lines)) + len(lines)) / max(1, len(lines)))
        columns = columns_of(self.records)
        is_kept = np.zeros(len(self.records), dtype=bool)
        is_kept[-history.records % stride :: stride] = True
        for name, column in columns.items() if stride > 1 else ():
            if name.startswith(RARE_FIELDS):
                is_kept |= np.isfinite(column)
        self.probes = last_probes(columns)
        self.columns = {name: column[is_kept] for name, column in columns.items()}
        self.rows = int(is_kept.sum())


def sample_of(found: Mapping[int, bytes]) -> History:
    """Of lines here and there, by where they begin."""
    sample = History(is_sample=True)
    parsed = [(offset, parse_line(line)) for offset, line in sorted(found.items())]
    records = [(offset, record) for offset, record in parsed if record is not None]
    for offset, record in records:
        sample.index.add(offset, record)
    if records:
        columns = columns_of([record for _, record in records])
        sample.keep(columns, len(records))
        sample.probes = last_probes(columns)
    sample.records = len(records)
    return sample


def last_probes(columns: Mapping[str, Numbers]) -> dict[str, tuple[float, float]]:
    found = {}
    for name, column in columns.items():
        if name.startswith(PROBE_PREFIX) and "step" in columns:
            last = np.flatnonzero(np.isfinite(column))[-1]
            found[name.removeprefix(PROBE_PREFIX)] = (float(columns["step"][last]), float(column[last]))
    return found


def _counted(record: dict[str, Any]) -> float:
    """Seconds of a step that goodput counts."""
    values = [record.get(f"{kind}_seconds") or 0.0 for kind in ("step", "data_wait", "validation", "checkpoint")]
    return float(values[0] - sum(values[1:]))
