"""A run's curves for a picture, from metrics.jsonl and events.jsonl read in steps: any length in bounded memory.

Smoothing is done on the records themselves, before they are thinned out, so that it means the same at every length.
"""

import bisect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from z2all_ds.base.console import progress
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.downsample import DownsampledCurve
from z2all_ds.track.fields import PROBE_PREFIX, TOKENS_PREFIX
from z2all_ds.track.plot_kinds import KINDS, PROBE_LABELS
from z2all_ds.track.tail import LineTail, LocalFile
from z2all_ds.track.writer import parse_record

X_FIELDS = {"step": "step", "tokens": "tokens_seen", "time": "time_unix"}
PROGRESS_FROM_BYTES = 32 << 20
"""Smaller files are read before a person would look up."""
MOST_MARKS_OF_A_KIND = 300


@dataclass(frozen=True)
class Asked:
    """The mixture that a stage was to have."""

    first_step: int
    shares: dict[str, float]


@dataclass
class RunCurves:
    """What is drawn of one run."""

    name: str
    curves: dict[str, DownsampledCurve] = field(default_factory=dict)
    """By field of metrics.jsonl; of `tokens_of_X` the share since the stage began."""
    smoothed: dict[str, DownsampledCurve] = field(default_factory=dict)
    marks: dict[str, list[float]] = field(default_factory=dict)
    """Where something happened, by what it was."""
    asked: list[Asked] = field(default_factory=list)
    probe_labels: dict[str, str] = field(default_factory=dict)
    """What the values of each probe are, by its field; runs of before did not say."""
    kinds_there: list[str] = field(default_factory=list)
    """Kinds of curves that the run has values for, wanted or not."""
    steps_and_x: tuple[list[float], list[float]] = ([], [])

    def keys_of(self, kind: str, label: str | None = None) -> list[str]:
        """Fixed ones in their order, then domains by name. With a `label`, of probes those with such values."""
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


def read_run(run_dir: Path, name: str, kinds: list[str], x_axis: str, smooth: float) -> RunCurves:
    """Of the kinds asked for, those there are."""
    if x_axis not in X_FIELDS:
        raise ConfigError(f"--x {x_axis}", "no such axis", f"Known: {', '.join(X_FIELDS)}.")
    if not 0.0 <= smooth < 1.0:
        raise ConfigError(f"--smooth {smooth:g}", "must be from 0 to 0.999", "0 does not smooth, 0.9 does so gently.")
    folder = RunFolder(run_dir)
    asked = _asked_mixture(folder.events)
    reader = _Reader(run_dir, kinds, x_axis, smooth, [stage.first_step for stage in asked])
    tail = LineTail(LocalFile(folder.metrics))
    size = LocalFile(folder.metrics).size()
    if size < PROGRESS_FROM_BYTES:
        reader = _read_all(tail, reader)
    else:
        with progress(f"reading {name}", size, "bytes") as advance:
            reader = _read_all(tail, reader, advance)
    if not reader.has_steps:
        rule = "no metrics.jsonl with a step in it"
        raise DataError(f"{run_dir}", rule, "Give the folder of a run that has trained.")
    run = reader.found(name, asked)
    run.probe_labels = _probe_labels(folder.events)
    run.marks = _marks(folder.events, run, x_axis, reader.first_x)
    return run


def _read_all(tail: LineTail, reader: "_Reader", advance: Any = None) -> "_Reader":
    while True:
        before = tail.offset
        new = tail.read()
        if new.begins_anew:  # the run went back while we read
            reader = reader.begun_anew()
        reader.take(new.lines)
        if advance:
            advance(max(0, tail.offset - before))
        if new.is_all or not new.lines:
            return reader


class _Reader:
    """Deals the values of records out to their curves."""

    def __init__(self, run_dir: Path, kinds: list[str], x_axis: str, smooth: float, stage_starts: list[int]) -> None:
        self._arguments = (run_dir, kinds, x_axis, smooth, stage_starts)
        self._run_dir, self._x_field, self._smooth = run_dir, X_FIELDS[x_axis], smooth
        self._is_time = x_axis == "time"
        self._wanted = [KINDS[kind] for kind in kinds]
        self._stage_starts = stage_starts
        self._curves: dict[str, DownsampledCurve] = {}
        self._takers: dict[str, list[Callable[[float, float], None]]] = {}
        """Of every field met so far; most have none."""
        self._token_keys: list[str] = []
        self._averages: dict[str, _MovingAverage] = {}
        self._steps = DownsampledCurve()
        self._tokens: dict[str, float] = {}
        self._stage = 0
        self.has_steps = False
        self.first_x = 0.0

    def begun_anew(self) -> "_Reader":
        return _Reader(*self._arguments)

    def take(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            try:
                self._take_record(parse_record(line))
            except (ValueError, KeyError) as error:
                what = f"has no {error}" if isinstance(error, KeyError) else f"is not JSON ({error})"
                raise DataError(
                    f"{RunFolder(self._run_dir).metrics}",
                    f"a record {what}",
                    "Give a run's folder as it was written, or another --x.",
                ) from None

    def _take_record(self, record: dict[str, Any]) -> None:
        step, x = record["step"], record[self._x_field]
        if not self.has_steps:
            self.has_steps, self.first_x = True, x if self._is_time else 0.0
        x -= self.first_x
        self._steps.add(step, x)
        takers, isfinite = self._takers, math.isfinite
        for key, value in record.items():
            if value is None:
                continue
            if key not in takers:
                self._meet(key)
            for take in takers[key]:
                if isfinite(value):
                    take(x, value)
        if self._token_keys:
            self._take_tokens(step, x, record)

    def _meet(self, key: str) -> None:
        """A field that was in no record before."""
        self._takers[key] = []
        kind = next((kind for kind in self._wanted if kind.has(key)), None)
        if kind is None:
            return
        curve = self._curves[key] = DownsampledCurve()
        if key.startswith(TOKENS_PREFIX):
            self._token_keys.append(key)
            return
        self._takers[key].append(curve.add)
        if kind.is_smoothed and self._smooth:
            average = self._averages[key] = _MovingAverage(self._smooth)
            self._takers[key].append(average.add)

    def _take_tokens(self, step: int, x: float, record: dict[str, Any]) -> None:
        stage = bisect.bisect_left(self._stage_starts, step)
        if stage != self._stage:
            self._stage, self._tokens = stage, {}
        for key in self._token_keys:
            self._tokens[key] = self._tokens.get(key, 0.0) + (record.get(key) or 0.0)
        total = sum(self._tokens.values())
        for key, tokens in self._tokens.items() if total else ():
            self._curves[key].add(x, tokens / total)

    def found(self, name: str, asked: list[Asked]) -> RunCurves:
        steps = self._steps.points()
        curves = {key: curve for key, curve in self._curves.items() if curve.points().x}
        kinds = [kind for kind, known in KINDS.items() if any(known.has(key) for key in self._takers)]
        smoothed = {key: average.curve for key, average in self._averages.items()}
        return RunCurves(name, curves, smoothed, {}, asked, {}, kinds, (steps.x, steps.y))


class _MovingAverage:
    """Exponential, and free of its beginning: the first values weigh as much as they should, not more."""

    def __init__(self, keeps: float) -> None:
        self.curve = DownsampledCurve()
        self._keeps, self._sum, self._weight = keeps, 0.0, 0.0

    def add(self, x: float, value: float) -> None:
        self._sum = self._keeps * self._sum + (1 - self._keeps) * value
        self._weight = self._keeps * self._weight + 1 - self._keeps
        self.curve.add(x, self._sum / self._weight)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines that say what happened; others are passed over, as on the board."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                event: Any = parse_record(line) if line.endswith(b"\n") else None
            except ValueError:
                continue
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                yield event


def _asked_mixture(events: Path) -> list[Asked]:
    """As the last start has said it, for all stages."""
    found: list[Asked] = []
    for event in _events(events):
        if event["event"] == "started" and event.get("mixture"):
            found = [Asked(stage["first_step"], stage["shares"]) for stage in event["mixture"]]
    return found


def _probe_labels(events: Path) -> dict[str, str]:
    asked = [probe for event in _events(events) for probe in event.get("probes") or ()]
    return {f"{PROBE_PREFIX}{one['name']}": PROBE_LABELS[one["kind"]] for one in asked if one["kind"] in PROBE_LABELS}


def _marks(events: Path, run: RunCurves, x_axis: str, first_x: float) -> dict[str, list[float]]:
    """Several that would fall onto one another are one."""
    last_x = run.steps_and_x[1][-1]
    width = (last_x - run.steps_and_x[1][0]) / MOST_MARKS_OF_A_KIND
    marks: dict[str, dict[int, float]] = {}
    has_started = False
    for event in _events(events):
        kind = MARKS.get(event["event"])
        if event["event"] == "started":
            kind, has_started = ("restart" if has_started else None), True
        place = event.get("time_unix" if x_axis == "time" else "step")
        if kind is None or (kind == "stage" and not event.get("step")) or not isinstance(place, int | float):
            continue
        x = place - first_x if x_axis == "time" else run.x_of_step(place)
        if x <= last_x or x_axis != "time":
            marks.setdefault(kind, {}).setdefault(int(x / width) if width else 0, x)
    return {kind: list(places.values()) for kind, places in marks.items()}


MARKS = {"spike": "spike", "rolled_back": "rollback", "checkpoint": "checkpoint", "stage": "stage"}
"""Events of a run, and what the picture calls them; a start that is not the first is a restart."""
