"""A run's metrics.jsonl in little memory: seen at once as a sample, then read whole in steps, then followed.

900 MB are 10^6 steps. A long file is first looked at in some 2,000 places, which is enough to draw with. Then all of
it is read into buckets (`tables`), of which there are 8,192 however long the run. Where the page zooms in so far that
buckets are too coarse, that part of the file is read again: an index knows which bytes hold which steps. A long file on
another machine is never read whole, only sampled, zoomed into and followed from its end.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from z2all_ds.track.board.files import Files, OneFile
from z2all_ds.track.board.history import RARE_FIELDS, STEP_BYTES, Batch, History, last_probes, sample_of
from z2all_ds.track.tables import COUNT, LEAST, MOST, Numbers, columns_of, mean_of, merged, parse_line
from z2all_ds.track.tables import table_of as table_of_values
from z2all_ds.track.tail import LineTail

SAMPLE_FROM_BYTES = 4 << 20
"""Shorter files are read before anybody asks."""
SAMPLE_ROUNDS = (256, 2048)
"""Places looked at: few at once, for a slow disk, then enough."""
PLACES_AT_ONCE = 512
FAR_WHOLE_BYTES = 64 << 20
RAW_BYTES, FAR_RAW_BYTES = 32 << 20, 2 << 20
"""Most that is read again for one zoom."""
END_BYTES = 1 << 16
RECENT_RECORDS = 256
AXES = {"step": "step", "tokens": "tokens_seen", "time": "time_unix"}
RARE_WORDS = [f'"{field}' for field in RARE_FIELDS]
"""In records that a sample would miss: they are looked for by name."""
RARE_STEP_BYTES = 64 << 20
RARE_RECORDS = 2048
one_at_a_time = threading.Lock()
"""For what holds megabytes: however many runs are read and charts are zoomed, memory holds one step of one."""


class Curves:
    """metrics.jsonl of one run. `look` is called by the run's thread again and again; the rest by requests."""

    def __init__(self, files: Files, path: str) -> None:
        self._files, self._path = files, path
        self._lock = threading.Lock()
        self._shown = History(is_sample=False)
        self._reading = self._shown
        self._tail = LineTail(OneFile(files, path))
        self._size, self._done_bytes = 0, 0
        self._seen: list[float] | None = None
        self._is_begun = False
        self.is_behind = False
        """There is something to read that is not read yet."""
        self.history = 0
        self.first: dict[str, Any] = {}
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_RECORDS)
        """The file's last records, also while the rest is still being read."""

    # Reading

    def look(self, sign: list[float]) -> bool:
        """One step of reading, given the file's sign of just now. True: there is more to read at once."""
        if sign == self._seen and not self.is_behind:
            return False
        grew, was_behind = sign != self._seen, self.is_behind
        self._seen, self._size = sign, int(sign[0])
        self.is_behind = self._is_begun or self._size > 0  # until it is read: the connection may break meanwhile
        if not self.is_behind:
            if any(sign):
                self._forget()
            return False
        if not self._is_begun:
            self._begin()
            self._is_begun = True
        elif grew and was_behind:
            self._read_end()
        return self._step()

    def _forget(self) -> None:
        """The file was cut back to nothing. One that is missing may be on its way: what it held is still shown."""
        with self._lock:
            self._shown = self._reading = History(is_sample=False)
        self.first, self.recent = {}, deque(maxlen=RECENT_RECORDS)

    def _begin(self) -> None:
        """The first sight of a history."""
        self._read_end()
        first = self._files.lines_at(self._path, [0])
        record = parse_line(first[0][1]) if first else None
        self.first = record or {}
        self._reading, self._done_bytes = History(is_sample=False), 0
        if self._size < SAMPLE_FROM_BYTES:
            return
        found: dict[int, bytes] = {}
        for places in SAMPLE_ROUNDS:
            found |= self._lines_here_and_there(0, self._size, places)
            sample = sample_of(found)
            with self._lock:
                self._shown = sample
        if self._files.is_far and self._size > FAR_WHOLE_BYTES:
            found |= self._rare_lines()
            end = self._files.read(self._path, max(0, self._size - END_BYTES), min(self._size, END_BYTES))
            self._tail.skip_to(self._size - len(end) + end.rfind(b"\n") + 1)
            sample = sample_of(found)
            with self._lock:
                self._shown = self._reading = sample

    def _lines_here_and_there(self, begin: int, end: int, places: int) -> dict[int, bytes]:
        offsets = [begin + (end - begin) * place // places for place in range(places)]
        found: dict[int, bytes] = {}
        for first in range(0, places, PLACES_AT_ONCE):
            found |= dict(self._files.lines_at(self._path, offsets[first : first + PLACES_AT_ONCE]))
        return found

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
        found = self._tail.read(STEP_BYTES)
        if found.begins_anew:
            self.history += 1
            self._tail = LineTail(OneFile(self._files, self._path))
            self._is_begun, self.is_behind, self._seen = False, False, None
            return True
        with one_at_a_time:
            batch = Batch(found.lines, self._reading)
            with self._lock:
                self._reading.add(offset, batch)
        self._done_bytes = self._tail.offset
        self.is_behind = not found.is_all
        if found.is_all:
            if self._shown is not self._reading:
                with self._lock:
                    self._shown = self._reading
            self.recent.extend(_newer(batch.records, self.recent[-1]) if self.recent else batch.records)
        return not found.is_all

    # What requests ask for

    @property
    def records(self) -> int:
        """Read so far; another number wherever there is more to show, a first sample included."""
        return max(self._shown.records, self._reading.records)

    @property
    def read_share(self) -> float:
        """1 where nothing more will be read, also where that is a sample for good."""
        return min(1.0, self._done_bytes / self._size) if self._size and self.is_behind else 1.0

    @property
    def is_sample(self) -> bool:
        """Curves are drawn from a sample of the file, for now or for good."""
        return self._shown.is_sample

    @property
    def unparsable(self) -> int:
        return self._reading.unparsable

    def names(self) -> list[str]:
        with self._lock:
            names = dict.fromkeys(self._shown.buckets.names + self._reading.buckets.names)
        for record in list(self.recent)[-8:]:
            names.update(dict.fromkeys(key for key, value in record.items() if isinstance(value, int | float)))
        return sorted(names)

    def total(self, name: str) -> float:
        """Over the records that were kept."""
        with self._lock:
            return self._shown.buckets.total(name)

    def counted_seconds(self) -> float | None:
        """None as long as not all is read."""
        with self._lock:
            if self._shown.is_sample or not self._shown.buckets.records:
                return None
            total = self._shown.buckets.total
            rest = total("data_wait_seconds") + total("validation_seconds") + total("checkpoint_seconds")
            return total("step_seconds") - rest - self._shown.untaken_seconds

    def probes(self) -> dict[str, tuple[float, float]]:
        """Step and value of the last answer to each probe, by its name."""
        with self._lock:
            found, is_sample = {**self._shown.probes}, self._shown.is_sample
        return found | last_probes(columns_of(list(self.recent))) if is_sample else found

    def tokens_at(self, steps: Sequence[float]) -> list[float | None]:
        """tokens_seen of these steps; None beyond what is known."""
        return self._at("tokens_seen", steps, 0.0)

    def times_at(self, steps: Sequence[float], start_unix: float) -> list[float | None]:
        """time_unix of these steps, of a run that began then; None beyond what is known."""
        return self._at("time_unix", steps, start_unix)

    def _at(self, name: str, steps: Sequence[float], at_first: float) -> list[float | None]:
        with self._lock:
            tables = np.stack([self._shown.buckets.table(column) for column in ("step", name)])
        tables = tables[:, :, (tables[:, COUNT] > 0).all(axis=0)]
        known = np.stack([np.append(0.0, mean_of(tables[0])), np.append(at_first, mean_of(tables[1]))])
        # The last bucket's mean comes before its last record, and a sample's last record before the file's.
        for end in (tables[:, MOST, -1:], _last_of(list(self.recent), name)):
            if end.size and end[0, 0] > known[0, -1]:
                known = np.append(known, end, axis=1)
        found = np.interp(np.asarray(steps, dtype=float), *known)
        return [float(value) if step <= known[0, -1] else None for step, value in zip(steps, found, strict=True)]

    def points(
        self, names: Sequence[str], axis: str, low: float | None, high: float | None, most: int
    ) -> dict[str, Any]:
        """At most `most` points of these series between two places of the axis (`AXES`), as the page wants them."""
        x_name = AXES[axis]
        wanted = [*dict.fromkeys([*names, x_name])]
        with self._lock:
            history, records, shown = self.history, self.records, self._shown
            tables = {name: shown.buckets.table(name) for name in wanted}
            weights = shown.buckets.weights()
        if shown is not self._reading or shown.is_sample:
            tables, weights = _with_recent(tables, weights, x_name, list(self.recent))
        if low is not None or high is not None:
            low, high = -np.inf if low is None else low, np.inf if high is None else high
            inside = (tables[x_name][MOST] >= low) & (tables[x_name][LEAST] <= high)
            if inside.sum() < most and (shown.is_sample or shown.buckets.width > 1):
                raw = self._raw(shown, wanted, x_name, low, high, most)
                if raw is not None:
                    tables, weights = raw
                    inside = (tables[x_name][MOST] >= low) & (tables[x_name][LEAST] <= high)
        else:
            inside = tables[x_name][COUNT] > 0
        tables = {name: table[:, inside] for name, table in tables.items()}
        return {"history": history, "records": records, **_drawn(tables, weights[inside], names, x_name, most)}

    def _raw(
        self, shown: History, wanted: Sequence[str], x_name: str, low: float, high: float, most: int
    ) -> "tuple[dict[str, Numbers], Numbers] | None":
        """That part of the file, read again; None where it is too long for that."""
        begin, end = shown.index.part(x_name, low, high, self._size)
        if end - begin > (FAR_RAW_BYTES if self._files.is_far else RAW_BYTES):
            if not shown.is_sample:
                return None
            sample = sample_of(self._lines_here_and_there(begin, end, most))
            return {name: sample.buckets.table(name) for name in wanted}, sample.buckets.weights()
        parts: list[dict[str, Numbers]] = []
        counts: list[int] = []
        tail = LineTail(OneFile(self._files, self._path))
        tail.skip_to(begin)
        is_all = False
        while tail.offset < end and not is_all:
            found = tail.read(min(STEP_BYTES, max(END_BYTES, end - tail.offset)))
            is_all = found.is_all
            with one_at_a_time:
                records = [record for line in found.lines if (record := parse_line(line)) is not None]
                records = [{name: record.get(name) for name in wanted} for record in records]
                parts.append(columns_of(records) if records else {})
                counts.append(len(records))
        columns = {
            name: np.concatenate(
                [part.get(name, np.full(count, np.nan)) for part, count in zip(parts, counts, strict=True)]
            )
            for name in wanted
        }
        length = sum(counts)
        if not length:
            return None
        starts = np.arange(length)
        return {name: table_of_values(column, starts) for name, column in columns.items()}, np.ones(length)


def _last_of(recent: Sequence[dict[str, Any]], name: str) -> Numbers:
    """Step and value of the last record, as a column; none where it does not say both."""
    columns = columns_of(recent[-1:])
    return np.stack([columns["step"], columns[name]]) if {"step", name} <= columns.keys() else np.empty((2, 0))


def _newer(records: Sequence[dict[str, Any]], last: dict[str, Any]) -> list[dict[str, Any]]:
    return [record for record in records if (record.get("step") or 0) > (last.get("step") or 0)]


def _with_recent(
    tables: dict[str, Numbers], weights: Numbers, x_name: str, recent: Sequence[dict[str, Any]]
) -> tuple[dict[str, Numbers], Numbers]:
    """A sample, and after it the file's last records."""
    last = tables[x_name][MOST].max(initial=-np.inf)
    records = [record for record in recent if (record.get(x_name) or -np.inf) > last]
    if not records:
        return tables, weights
    columns, starts = columns_of(records), np.arange(len(records))
    missing = np.full(len(records), np.nan)
    joined = {
        name: np.concatenate([table, table_of_values(columns.get(name, missing), starts)], axis=1)
        for name, table in tables.items()
    }
    return joined, np.append(weights, np.ones(len(records)))


def _drawn(
    tables: dict[str, Numbers], weights: Numbers, names: Sequence[str], x_name: str, most: int
) -> dict[str, Any]:
    length = len(weights)
    if length:
        order = np.argsort(mean_of(tables[x_name]), kind="stable")
        starts = np.arange(0, length, -(-length // most))
        tables = {name: merged(table[:, order], starts) for name, table in tables.items()}
        weights = np.add.reduceat(weights[order], starts)
    series = {}
    for name in names:
        table = tables[name]
        has_value = table[COUNT] > 0
        least, highest = (np.where(has_value, table[row], np.nan) for row in (LEAST, MOST))
        series[name] = {"mean": mean_of(table), "min": least, "max": highest}
    x = tables[x_name]
    return {"x": mean_of(x), "x_first": x[LEAST], "x_last": x[MOST], "weight": weights, "series": series}
