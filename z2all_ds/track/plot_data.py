"""A run's curves for a plot, read from metrics.jsonl and events.jsonl in steps: any length in bounded memory.

Smoothing is applied to the records before they are downsampled, so its result does not depend on the run's length.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from z2all_ds.base.console import Advance, progress
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.fields import PROBE_PREFIX, TOKENS_PREFIX
from z2all_ds.track.plot_kinds import KINDS, PROBE_LABELS
from z2all_ds.track.tables import DownsampledCurve
from z2all_ds.track.tail import LineTail
from z2all_ds.track.writer import parse_line, parse_record

X_FIELDS = {"step": "step", "tokens": "tokens_seen", "time": "time_unix"}
PROGRESS_FROM_BYTES = 32 << 20
"""Smaller files are read within a moment."""
MOST_MARKS_OF_A_KIND = 300
MARKS = {"spike": "spike", "rolled_back": "rollback", "checkpoint": "checkpoint", "stage": "stage"}
"""Events and their names in the plot; a start that is not the first is a restart."""


@dataclass(frozen=True)
class StageMixture:
    """The mixture that was requested for a stage."""

    first_step: int
    shares: dict[str, float]


@dataclass
class RunCurves:
    """The content of a plot of one run."""

    name: str
    curves: dict[str, DownsampledCurve] = field(default_factory=dict)
    """By field of metrics.jsonl; for `tokens_of_X`, its share since the stage began."""
    smoothed: dict[str, DownsampledCurve] = field(default_factory=dict)
    marks: dict[str, list[float]] = field(default_factory=dict)
    """x values of events, by their name in the plot."""
    requested: list[StageMixture] = field(default_factory=list)
    probe_labels: dict[str, str] = field(default_factory=dict)
    """Axis of each probe, by its field; older runs did not record it."""
    kinds_there: list[str] = field(default_factory=list)
    """Kinds that the run has values for, wanted or not."""
    steps_and_x: tuple[list[float], list[float]] = ([], [])

    def keys_of(self, kind: str, label: str | None = None) -> list[str]:
        """Returns the fields of a kind: fixed ones in their order, then the others by name. `label`: only probes with
        this axis."""
        known = KINDS[kind]
        named = [key for key in known.keys if key in self.curves]
        found = [*named, *sorted(key for key in self.curves if known.has(key) and key not in known.keys)]
        return [key for key in found if label is None or self.probe_labels.get(key, known.y_label) == label]

    def x_of_step(self, step: float) -> float:
        steps, xs = self.steps_and_x
        right = bisect.bisect_left(steps, step)
        if right in (0, len(steps)):
            return xs[min(right, len(steps) - 1)]
        share = (step - steps[right - 1]) / (steps[right] - steps[right - 1])
        return xs[right - 1] + share * (xs[right] - xs[right - 1])


@dataclass(frozen=True)
class Panel:
    """One panel of a plot: a kind of curves of these runs."""

    kind: str
    runs: list[RunCurves]
    label: str | None = None
    """Only probes with this axis."""


def read_run(run_dir: Path, name: str, kinds: list[str], x_axis: str, smooth: float) -> RunCurves:
    """Reads the curves of these kinds, as far as the run has them."""
    if x_axis not in X_FIELDS:
        raise ConfigError(f"--x {x_axis}", "unknown axis", f"Known: {', '.join(X_FIELDS)}.")
    if not 0.0 <= smooth < 1.0:
        raise ConfigError(f"--smooth {smooth:g}", "must be from 0 to 0.999", "0 does not smooth, 0.9 smooths a little.")
    folder = RunFolder(run_dir)
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
    steps = reader.steps.points()
    if not steps.x:
        rule = "no metrics.jsonl with a step in it"
        raise DataError(f"{run_dir}", rule, "Give the folder of a run that has trained.")
    run = RunCurves(
        name,
        {key: curve for key, curve in reader.curves.items() if curve.points().x},
        {key: average.curve for key, average in reader.averages.items()},
        requested=requested,
        kinds_there=[kind for kind, known in KINDS.items() if any(known.has(key) for key in reader.keys)],
        steps_and_x=(steps.x, steps.y),
    )
    probes = [probe for event in events for probe in event.get("probes") or () if probe["kind"] in PROBE_LABELS]
    run.probe_labels = {f"{PROBE_PREFIX}{probe['name']}": PROBE_LABELS[probe["kind"]] for probe in probes}
    run.marks = _marks(events, run, x_axis, reader.first_x)
    return run


class _Reader:
    """Distributes the values of metrics.jsonl to curves."""

    def __init__(self, path: Path, kinds: list[str], x_axis: str, smooth: float, stage_starts: list[int]) -> None:
        self._path, self._x_field, self._smooth = path, X_FIELDS[x_axis], smooth
        self._is_time = x_axis == "time"
        self._wanted = [KINDS[kind] for kind in kinds]
        self._stage_starts = stage_starts
        self._reset()

    def _reset(self) -> None:
        self.curves: dict[str, DownsampledCurve] = {}
        self.averages: dict[str, _MovingAverage] = {}
        self.keys: set[str] = set()
        """All fields with values, wanted or not."""
        self.steps = DownsampledCurve()
        self.first_x = 0.0
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
            for line in new.lines:
                try:
                    self._add(parse_record(line))
                except (ValueError, KeyError) as error:
                    what = f"has no {error}" if isinstance(error, KeyError) else f"is not JSON ({error})"
                    fix = "Give an unchanged run folder, or another --x."
                    raise DataError(f"{self._path}", f"a record {what}", fix) from None
            advance(max(0, tail.offset - before))
            if new.is_all or not new.lines:
                return

    def _add(self, record: dict[str, Any]) -> None:
        step, x = record["step"], record[self._x_field]
        if not self.keys and self._is_time:
            self.first_x = x
        x -= self.first_x
        self.steps.add(step, x)
        for key, value in record.items():
            if value is None:
                continue
            if key not in self.keys:
                self._add_key(key)
            if key in self.curves and not key.startswith(TOKENS_PREFIX) and math.isfinite(value):
                self.curves[key].add(x, value)
                if key in self.averages:
                    self.averages[key].add(x, value)
        if self._tokens:
            self._add_tokens(step, x, record)

    def _add_key(self, key: str) -> None:
        self.keys.add(key)
        kind = next((kind for kind in self._wanted if kind.has(key)), None)
        if kind is None:
            return
        self.curves[key] = DownsampledCurve()
        if key.startswith(TOKENS_PREFIX):
            self._tokens[key] = 0.0
        elif kind.is_smoothed and self._smooth:
            self.averages[key] = _MovingAverage(self._smooth)

    def _add_tokens(self, step: int, x: float, record: dict[str, Any]) -> None:
        stage = bisect.bisect_left(self._stage_starts, step)
        if stage != self._stage:
            self._stage, self._tokens = stage, dict.fromkeys(self._tokens, 0.0)
        for key in self._tokens:
            self._tokens[key] += record.get(key) or 0.0
        total = sum(self._tokens.values())
        for key, tokens in self._tokens.items() if total else ():
            self.curves[key].add(x, tokens / total)


class _MovingAverage:
    """An exponential moving average, corrected for its start."""

    def __init__(self, weight_of_past: float) -> None:
        self.curve = DownsampledCurve()
        self._past, self._sum, self._weight = weight_of_past, 0.0, 0.0

    def add(self, x: float, value: float) -> None:
        self._sum = self._past * self._sum + (1 - self._past) * value
        self._weight = self._past * self._weight + 1 - self._past
        self.curve.add(x, self._sum / self._weight)


def _read_events(path: Path) -> list[dict[str, Any]]:
    """Returns all events; lines that are not events are skipped, as on the board."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [event for line in lines if (event := parse_line(line)) and isinstance(event.get("event"), str)]


def _marks(events: Sequence[dict[str, Any]], run: RunCurves, x_axis: str, first_x: float) -> dict[str, list[float]]:
    """Returns the marks by kind; those that would be drawn over each other are one."""
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
        if x <= last_x or x_axis != "time":
            marks.setdefault(kind, {}).setdefault(int(x / width) if width else 0, x)
    return {kind: list(found.values()) for kind, found in marks.items()}
