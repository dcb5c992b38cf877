"""A run's metrics.jsonl in little memory: first sampled, then read completely in steps, then followed.

10^6 steps are 900 MB. A long file is first sampled at about 2,000 offsets, which is enough to draw. Then all of it is
read into 8,192 buckets (`tables`), however long the run is. If the page zooms in so far that buckets are too coarse,
that part of the file is read again; an index has the offsets of steps. A long file on another machine is never read
completely, only sampled, zoomed into and followed from its end.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from z2all_ds.track.board.history import RARE_FIELDS, STEP_BYTES, History, last_probes
from z2all_ds.track.fields import AXES
from z2all_ds.track.files import Files
from z2all_ds.track.tables import COUNT, MAX, MIN, Numbers, columns_of, mean_of, merge_buckets, table_of
from z2all_ds.track.tail import LineTail
from z2all_ds.track.writer import parse_line

SAMPLE_FROM_BYTES = 4 << 20
"""Shorter files are read so soon that they need no sample."""
SAMPLE_ROUNDS = (256, 2048)
"""Offsets sampled: first few, for a slow disk, then enough."""
REMOTE_WHOLE_BYTES = 64 << 20
RAW_BYTES, REMOTE_RAW_BYTES = 32 << 20, 2 << 20
"""Most that is read again for one zoom."""
END_BYTES = 1 << 16
RECENT_RECORDS = 256
RARE_WORDS = [f'"{field}' for field in RARE_FIELDS]
"""Searched for in a sampled file."""
RARE_STEP_BYTES = 64 << 20
RARE_RECORDS = 2048
one_at_a_time = threading.Lock()
"""Held while megabytes are in memory, so that only one step of one run is, however many runs are read or zoomed."""
Tables = dict[str, Numbers]


class Curves:
    """metrics.jsonl of one run. `update` is called by the run's thread, everything else by requests."""

    def __init__(self, files: Files, path: str) -> None:
        self._files, self._path = files, path
        self._lock = threading.Lock()
        self._shown = self._reading = History(is_sample=False)
        self._tail = LineTail(path, files)
        self._size, self._done_bytes = 0, 0
        self._stat: list[float] | None = None
        self._is_begun = False
        self.is_behind = False
        """The file has content that is not read yet."""
        self.history = 0
        """Number of times that the file was truncated."""
        self.first: dict[str, Any] = {}
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_RECORDS)
        """The file's last records, also while the rest is still being read."""

    # Reading

    def update(self, stat: list[float]) -> bool:
        """Take one step of reading, given the file's current stat. Return whether there is more to read."""
        if stat == self._stat and not self.is_behind:
            return False
        has_grown, was_behind = stat != self._stat, self.is_behind
        self._stat, self._size = stat, int(stat[0])
        self.is_behind = self._is_begun or self._size > 0  # until it is read: the connection may break before
        if not self.is_behind:
            if any(stat):  # truncated to nothing; a missing file may come back, so its curves stay
                with self._lock:
                    self._shown = self._reading = History(is_sample=False)
                self.first, self.recent = {}, deque(maxlen=RECENT_RECORDS)
            return False
        if not self._is_begun:
            self._begin()
            self._is_begun = True
        elif has_grown and was_behind:
            self._read_end()
        return self._step()

    def _begin(self) -> None:
        """Read the file's end and, if it is long, a sample of it."""
        self._read_end()
        first = self._files.lines_at(self._path, [0])
        self.first = (parse_line(first[0][1]) if first else None) or {}
        self._reading, self._done_bytes = History(is_sample=False), 0
        if self._size < SAMPLE_FROM_BYTES:
            return
        lines: dict[int, bytes] = {}
        for count in SAMPLE_ROUNDS:
            lines |= self._sampled_lines(0, self._size, count)
            sample = History.sample(lines)
            with self._lock:
                self._shown = sample
        if self._files.is_remote and self._size > REMOTE_WHOLE_BYTES:
            end = self._files.read(self._path, max(0, self._size - END_BYTES), min(self._size, END_BYTES))
            self._tail.skip_to(self._size - len(end) + end.rfind(b"\n") + 1)
            sample = History.sample(lines | self._rare_lines())
            with self._lock:
                self._shown = self._reading = sample

    def _sampled_lines(self, begin: int, end: int, count: int) -> dict[int, bytes]:
        offsets = [begin + (end - begin) * number // count for number in range(count)]
        return dict(self._files.lines_at(self._path, offsets))

    def _rare_lines(self) -> dict[int, bytes]:
        found: list[tuple[int, bytes]] = []
        for offset in range(0, self._size, RARE_STEP_BYTES):
            found += self._files.lines_with(self._path, RARE_WORDS, offset, RARE_STEP_BYTES)
            if len(found) > 2 * RARE_RECORDS:
                found = found[::2]
        return dict(found)

    def _read_end(self) -> None:
        begin = max(0, self._size - END_BYTES)
        lines = self._files.read(self._path, begin, END_BYTES).split(b"\n")
        records = [parse_line(line) for line in lines[1 if begin else 0 : -1]]
        self.recent = deque((record for record in records if record is not None), maxlen=RECENT_RECORDS)

    def _step(self) -> bool:
        offset = self._tail.offset
        new = self._tail.read(STEP_BYTES)
        if new.is_restarted:
            self.history += 1
            self._tail = LineTail(self._path, self._files)
            self._is_begun, self.is_behind, self._stat = False, False, None
            return True
        with one_at_a_time:
            records = self._reading.add(offset, new.lines, self._lock)
        self._done_bytes = self._tail.offset
        self.is_behind = not new.is_all
        if new.is_all:
            with self._lock:
                self._shown = self._reading
            last_step = (self.recent[-1].get("step") or 0) if self.recent else -1
            self.recent.extend(record for record in records if (record.get("step") or 0) > last_step)
        return not new.is_all

    # Answers to requests

    @property
    def records(self) -> int:
        """Records read so far; changes whenever there is more to show, also with a first sample."""
        return max(self._shown.records, self._reading.records)

    @property
    def read_share(self) -> float:
        """1 if nothing more will be read, also if only a sample was read."""
        return min(1.0, self._done_bytes / self._size) if self._size and self.is_behind else 1.0

    @property
    def is_sample(self) -> bool:
        """Curves are drawn from a sample of the file, for now or permanently."""
        return self._shown.is_sample

    @property
    def unparsable(self) -> int:
        return self._reading.unparsable

    def names(self) -> list[str]:
        with self._lock:
            names = {*self._shown.buckets.names, *self._reading.buckets.names}
        for record in list(self.recent)[-8:]:
            names.update(key for key, value in record.items() if isinstance(value, int | float))
        return sorted(names)

    def total(self, name: str) -> float:
        """Sum a field over the records that were kept."""
        with self._lock:
            return self._shown.buckets.total(name)

    def counted_seconds(self) -> float | None:
        """Return the seconds that goodput counts; None until all records are read."""
        with self._lock:
            is_complete = self._shown.records and not self._shown.is_sample
            return self._shown.counted_seconds if is_complete else None

    def probes(self) -> dict[str, tuple[float, float]]:
        """Return step and value of the last answer to each probe."""
        with self._lock:
            found, is_sample = {**self._shown.probes}, self._shown.is_sample
        return found | last_probes(columns_of(list(self.recent))) if is_sample else found

    def values_at(self, steps: Sequence[float], name: str, at_first: float = 0.0) -> list[float | None]:
        """Return tokens_seen or time_unix at these steps; None after the last known one. `at_first`: at step 0."""
        with self._lock:
            tables = np.stack([self._shown.buckets.table(column) for column in ("step", name)])
        tables = tables[:, :, (tables[:, COUNT] > 0).all(axis=0)]
        known = np.stack([np.append(0.0, mean_of(tables[0])), np.append(at_first, mean_of(tables[1]))])
        last = columns_of(list(self.recent)[-1:])
        end = np.stack([last["step"], last[name]]) if {"step", name} <= last.keys() else np.empty((2, 0))
        # The last bucket's mean is before its last record, and a sample's last record is before the file's.
        for more in (tables[:, MAX, -1:], end):
            if more.size and more[0, 0] > known[0, -1]:
                known = np.append(known, more, axis=1)
        found = np.interp(np.asarray(steps, dtype=float), *known)
        return [float(value) if step <= known[0, -1] else None for step, value in zip(steps, found, strict=True)]

    def points(
        self, names: Sequence[str], axis: str, low: float | None, high: float | None, most: int
    ) -> dict[str, Any]:
        """Return at most `most` points of these fields between two values of the axis (`AXES`), for the page."""
        x_name = AXES[axis]
        wanted = [*dict.fromkeys([*names, x_name])]
        with self._lock:
            history, records, shown = self.history, self.records, self._shown
            tables = {name: shown.buckets.table(name) for name in wanted}
            weights = shown.buckets.weights()
        if shown is not self._reading or shown.is_sample:
            tables, weights = _with_recent(tables, weights, x_name, list(self.recent))
        if low is None and high is None:
            inside = tables[x_name][COUNT] > 0
        else:
            low, high = -np.inf if low is None else low, np.inf if high is None else high
            inside = (tables[x_name][MAX] >= low) & (tables[x_name][MIN] <= high)
            if inside.sum() < most and (shown.is_sample or shown.buckets.width > 1):
                tables, weights = self._zoomed(shown, wanted, x_name, low, high, most) or (tables, weights)
                inside = (tables[x_name][MAX] >= low) & (tables[x_name][MIN] <= high)
        tables = {name: table[:, inside] for name, table in tables.items()}
        return {"history": history, "records": records, **_drawn(tables, weights[inside], names, x_name, most)}

    def _zoomed(
        self, shown: History, wanted: Sequence[str], x_name: str, low: float, high: float, most: int
    ) -> tuple[Tables, Numbers] | None:
        """Read a part of the file again; return None if it is too long."""
        begin, end = shown.index.range(x_name, low, high, self._size)
        if end - begin > (REMOTE_RAW_BYTES if self._files.is_remote else RAW_BYTES):
            if not shown.is_sample:
                return None
            sample = History.sample(self._sampled_lines(begin, end, most))
            return {name: sample.buckets.table(name) for name in wanted}, sample.buckets.weights()
        records: list[dict[str, Any]] = []
        tail = LineTail(self._path, self._files)
        tail.skip_to(begin)
        is_all = False
        while tail.offset < end and not is_all:
            new = tail.read(min(STEP_BYTES, max(END_BYTES, end - tail.offset)))
            is_all = new.is_all
            with one_at_a_time:
                parsed = [record for line in new.lines if (record := parse_line(line)) is not None]
                records += [{name: record.get(name) for name in wanted} for record in parsed]
        return (_tables_of(records, wanted), np.ones(len(records))) if records else None


def _tables_of(records: Sequence[dict[str, Any]], names: Sequence[str]) -> Tables:
    """Return tables with one record per bucket."""
    columns, starts = columns_of(records), np.arange(len(records))
    missing = np.full(len(records), np.nan)
    return {name: table_of(columns.get(name, missing), starts) for name in names}


def _with_recent(
    tables: Tables, weights: Numbers, x_name: str, recent: Sequence[dict[str, Any]]
) -> tuple[Tables, Numbers]:
    """Append the file's last records to a sample."""
    last = tables[x_name][MAX].max(initial=-np.inf)
    records = [record for record in recent if (record.get(x_name) or -np.inf) > last]
    if not records:
        return tables, weights
    more = _tables_of(records, list(tables))
    joined = {name: np.concatenate([table, more[name]], axis=1) for name, table in tables.items()}
    return joined, np.append(weights, np.ones(len(records)))


def _drawn(tables: Tables, weights: Numbers, names: Sequence[str], x_name: str, most: int) -> dict[str, Any]:
    """Merge buckets until there are at most `most`, and name their rows as the page expects them."""
    length = len(weights)
    if length:
        order = np.argsort(mean_of(tables[x_name]), kind="stable")
        starts = np.arange(0, length, -(-length // most))
        tables = {name: merge_buckets(table[:, order], starts) for name, table in tables.items()}
        weights = np.add.reduceat(weights[order], starts)
    series = {}
    for name in names:
        table = tables[name]
        low, high = (np.where(table[COUNT] > 0, table[row], np.nan) for row in (MIN, MAX))
        series[name] = {"mean": mean_of(table), "min": low, "max": high}
    x = tables[x_name]
    return {"x": mean_of(x), "x_first": x[MIN], "x_last": x[MAX], "weight": weights, "series": series}
