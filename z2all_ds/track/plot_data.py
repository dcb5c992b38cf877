"""A run's curves for a plot, read from metrics.jsonl and events.jsonl in steps: any length in bounded memory.

Smoothing is applied to the records before they are downsampled, so its result does not depend on the run's length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from z2all_ds.base.console import Advance, progress
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.fields import AXES, PROBE_PREFIX, TOKENS_PREFIX
from z2all_ds.track.files import LONGEST_LINE_BYTES
from z2all_ds.track.plot_kinds import KINDS, PROBE_LABELS
from z2all_ds.track.tables import COUNT, MAX, MIN, Buckets, Numbers, columns_of, mean_of
from z2all_ds.track.tail import LineTail
from z2all_ds.track.writer import parse_record, read_records

X, SMOOTHED = "x", "smoothed "
"""Names of columns that no field of metrics.jsonl has."""
MOST_POINTS = 2000
"""More than the pixels that a curve has on paper or on a screen."""
PROGRESS_FROM_BYTES = 32 << 20
"""Smaller files are read within a moment."""
MOST_MARKS_OF_A_KIND = 300
MARKS = {"spike": "spike", "rolled_back": "rollback", "checkpoint": "checkpoint", "stage": "stage"}
"""Events and their names in the plot; a start that is not the first is a restart."""


class Points(NamedTuple):
    """Points of a curve, each the mean of one or more records. The extremes keep a spike of one step visible."""

    x: Numbers
    y: Numbers
    low: Numbers
    high: Numbers


@dataclass(frozen=True)
class StageMixture:
    """The mixture that was requested for a stage."""

    first_step: int
    shares: dict[str, float]


@dataclass
class RunCurves:
    """The content of a plot of one run."""

    name: str
    curves: dict[str, Points]
    """By field of metrics.jsonl; for `tokens_of_X`, its share since the stage began."""
    smoothed: dict[str, Points]
    records_per_point: int
    marks: dict[str, list[float]] = field(default_factory=dict)
    """x values of events, by their name in the plot."""
    requested: list[StageMixture] = field(default_factory=list)
    probe_labels: dict[str, str] = field(default_factory=dict)
    """Axis of each probe, by its field; older runs did not record it."""
    kinds_there: list[str] = field(default_factory=list)
    """Kinds that the run has values for, wanted or not."""
    steps_and_x: tuple[Numbers, Numbers] = (np.empty(0), np.empty(0))

    def keys_of(self, kind: str, label: str | None = None) -> list[str]:
        """Return the fields of a kind: fixed ones in their order, then the others by name. `label`: only probes with
        this axis."""
        known = KINDS[kind]
        named = [key for key in known.keys if key in self.curves]
        found = [*named, *sorted(key for key in self.curves if known.has(key) and key not in known.keys)]
        return [key for key in found if label is None or self.probe_labels.get(key, known.y_label) == label]

    def x_of_step(self, step: float) -> float:
        return float(np.interp(step, *self.steps_and_x))


@dataclass(frozen=True)
class Panel:
    """One panel of a plot: a kind of curves of these runs."""

    kind: str
    runs: list[RunCurves]
    label: str | None = None
    """Only probes with this axis."""


def read_run(run_dir: Path, name: str, kinds: list[str], x_axis: str, smooth: float) -> RunCurves:
    """Read the curves of these kinds, as far as the run has them."""
    if x_axis not in AXES:
        raise ConfigError(f"--x {x_axis}", "unknown axis", f"Known: {', '.join(AXES)}.")
    if not 0.0 <= smooth < 1.0:
        raise ConfigError(f"--smooth {smooth:g}", "must be from 0 to 0.999", "0 does not smooth, 0.9 smooths a little.")
    folder = RunFolder(run_dir)
    if not folder.root.is_dir():
        raise DataError(f"{run_dir}", "no such folder", "Correct the path.")
    events = _read_events(folder.events)
    mixtures = [event["mixture"] for event in events if event["event"] == "started" and event.get("mixture")]
    requested = [StageMixture(stage["first_step"], stage["shares"]) for stage in mixtures[-1]] if mixtures else []
    reader = _Reader(folder.metrics, kinds, x_axis, smooth, [stage.first_step for stage in requested])
    size = folder.metrics.stat().st_size if folder.metrics.exists() else 0
    if size < PROGRESS_FROM_BYTES:
        reader.read(lambda amount, note="": None)
    else:
        with progress(f"reading {name}", size, "bytes") as advance:
            reader.read(advance)
    steps = reader.points("step")
    if not steps.x.size:
        rule = "no metrics.jsonl with a step in it"
        raise DataError(f"{run_dir}", rule, "Give the folder of a run that has trained.")
    names = [name for name in reader.buckets.names if any(KINDS[kind].has(name) for kind in kinds)]
    run = RunCurves(
        name,
        {name: points for name in names if (points := reader.points(name)).x.size},
        {name: reader.points(SMOOTHED + name) for name in names if SMOOTHED + name in reader.buckets.names},
        reader.buckets.width,
        requested=requested,
        kinds_there=[kind for kind, known in KINDS.items() if any(known.has(name) for name in reader.names)],
        steps_and_x=(steps.y, steps.x),
    )
    probes = [probe for event in events for probe in event.get("probes") or () if probe["kind"] in PROBE_LABELS]
    run.probe_labels = {f"{PROBE_PREFIX}{probe['name']}": PROBE_LABELS[probe["kind"]] for probe in probes}
    run.marks = _marks(events, run, x_axis, reader.first_x)
    return run


class _Reader:
    """Reads metrics.jsonl into buckets."""

    def __init__(self, path: Path, kinds: list[str], x_axis: str, smooth: float, stage_starts: list[int]) -> None:
        self._path, self._x_field, self._smooth = path, AXES[x_axis], smooth
        self._wanted = [KINDS[kind] for kind in kinds]
        self._stage_starts = stage_starts
        self._reset()

    def _reset(self) -> None:
        self.buckets = Buckets(MOST_POINTS)
        self.names: set[str] = set()
        """All fields with values, wanted or not."""
        self.first_x = 0.0
        self._averages: dict[str, tuple[float, float]] = {}
        """Weighted sum of the values so far, and the sum of the weights."""
        self._tokens: dict[str, float] = {}
        """Since the stage began."""
        self._stage = 0

    def read(self, advance: Advance) -> None:
        tail = LineTail(self._path)
        while True:
            before = tail.offset
            new = tail.read()
            if new.is_restarted:  # the run went back meanwhile
                self._reset()
            self._add(new.lines)
            if not new.lines and tail.offset > before:
                raise self._bad_record(f"is longer than {LONGEST_LINE_BYTES:,} bytes")
            advance(max(0, tail.offset - before))
            if new.is_all or not new.lines:
                return

    def points(self, name: str) -> Points:
        x, y = self.buckets.table(X), self.buckets.table(name)
        known = y[COUNT] > 0
        return Points(*(row[known] for row in (mean_of(x), mean_of(y), y[MIN], y[MAX])))

    def _add(self, lines: list[bytes]) -> None:
        try:
            records = [parse_record(line) for line in lines]
        except ValueError as error:
            raise self._bad_record(f"is not JSON ({error})") from None
        for name in ("step", self._x_field):
            if not all(isinstance(one, dict) and isinstance(one.get(name), int | float) for one in records):
                raise self._bad_record(f"has no '{name}', or it is not a number")
        if not records:
            return
        if not self.names and self._x_field == "time_unix":
            self.first_x = records[0]["time_unix"]
        columns = columns_of(records)
        self.names |= columns.keys()
        kept = {X: columns[self._x_field] - self.first_x, "step": columns["step"]}
        for name, values in columns.items():
            kind = next((kind for kind in self._wanted if kind.has(name)), None)
            if kind is not None and not name.startswith(TOKENS_PREFIX):
                kept[name] = values
                if kind.is_smoothed and self._smooth:
                    kept[SMOOTHED + name] = self._smoothed(name, values)
        if KINDS["mixture"] in self._wanted:
            kept |= self._token_shares(columns, len(records))
        self.buckets.add(kept, len(records))

    def _bad_record(self, what: str) -> DataError:
        return DataError(f"{self._path}", f"a record {what}", "Give an unchanged run folder, or another --x.")

    def _smoothed(self, name: str, values: Numbers) -> Numbers:
        """Return the exponential moving average, corrected for its start."""
        averages, (total, weight) = np.full(len(values), np.nan), self._averages.get(name, (0.0, 0.0))
        for number in np.flatnonzero(np.isfinite(values)):
            total = self._smooth * total + (1 - self._smooth) * values[number]
            weight = self._smooth * weight + 1 - self._smooth
            averages[number] = total / weight
        self._averages[name] = (total, weight)
        return averages

    def _token_shares(self, columns: dict[str, Numbers], records: int) -> dict[str, Numbers]:
        """Return the share of each domain since the stage began."""
        names = [
            *self._tokens,
            *(name for name in columns if name.startswith(TOKENS_PREFIX) and name not in self._tokens),
        ]
        stages = np.searchsorted(self._stage_starts, columns["step"])
        shares = {name: np.full(records, np.nan) for name in names}
        for stage in np.unique(stages):
            inside, before = stages == stage, self._tokens if stage == self._stage else {}
            sums = {
                name: before.get(name, 0.0) + np.nan_to_num(columns.get(name, shares[name])[inside]).cumsum()
                for name in names
            }
            total = np.sum(list(sums.values()), axis=0)
            for name in names:
                shares[name][inside] = np.divide(sums[name], total, out=np.full(len(total), np.nan), where=total > 0)
            self._stage, self._tokens = stage, {name: float(sums[name][-1]) for name in names}
        return shares


def _read_events(path: Path) -> list[dict[str, Any]]:
    """Return all events; lines that are not events are skipped, as on the board."""
    return [event for event in read_records(path) if isinstance(event.get("event"), str)]


def _marks(events: Sequence[dict[str, Any]], run: RunCurves, x_axis: str, first_x: float) -> dict[str, list[float]]:
    """Return the marks by kind; those that would be drawn over each other are one."""
    last_x = run.steps_and_x[1][-1]
    width = (last_x - run.steps_and_x[1][0]) / MOST_MARKS_OF_A_KIND
    marks: dict[str, dict[int, float]] = {}
    has_started = False
    for event in events:
        kind = MARKS.get(event["event"])
        if event["event"] == "started":
            kind, has_started = ("restart" if has_started else None), True
        value = event.get("time_unix" if x_axis == "time" else "step")
        if kind is None or (kind == "stage" and not event.get("step")) or not isinstance(value, int | float):
            continue
        x = value - first_x if x_axis == "time" else run.x_of_step(value)
        if math.isfinite(x) and (x <= last_x or x_axis != "time"):
            marks.setdefault(kind, {}).setdefault(int(x / width) if width else 0, x)
    return {kind: list(found.values()) for kind, found in marks.items()}
