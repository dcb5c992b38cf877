"""Probes for the board: what each asks and expects, its last value, and curves of later evaluations.

A run writes the values of its probes into metrics.jsonl, and their definitions into its start event. `z2all evaluate
probes` asks the saved checkpoints later and writes a file with the same content into the run folder.
"""

import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from z2all_ds.track.files import Files
from z2all_ds.track.writer import parse_line

LONGEST_BYTES = 16 << 20
MOST_FILES = 32
SETTLED_SECONDS = 2.0
"""A folder changed more recently may change again within the same tick of its clock."""
StepsTo = Callable[[Sequence[float]], list[float | None]]


class EvaluationFiles:
    """The files that `z2all evaluate probes` writes into a run folder; they may appear and change at any time."""

    def __init__(self, files: Files, folder: str) -> None:
        self._files, self._folder = files, folder
        self._stat: list[float] | None = None
        self._stats: dict[str, list[float]] = {}
        self._found: dict[str, dict[str, Any]] = {}
        self.version = 0
        """Incremented when the content has changed."""

    def update(self, stat: list[float], now_unix: float) -> None:
        """Read changed files, given the folder's current stat; renaming a file into the folder changes it."""
        if stat == self._stat:
            return
        names = [name for name in self._files.file_names(self._folder) if name.startswith("probes_")]
        names = [name for name in names if name.endswith(".json")][:MOST_FILES]
        paths = {name: posixpath.join(self._folder, name) for name in names}
        stats = dict(zip(names, self._files.stats(list(paths.values()))[1], strict=True)) if names else {}
        changed = [name for name in names if stats[name] != self._stats.get(name)]
        read = {name: parse_line(self._files.read(paths[name], 0, LONGEST_BYTES)) for name in changed}
        if changed or self._found.keys() - stats.keys():
            found = {name: self._found.get(name) for name in names} | read
            self._found = {name: content for name, content in found.items() if content is not None}
            self.version += 1
        self._stats = stats
        self._stat = stat if now_unix - stat[1] > SETTLED_SECONDS else None

    def contents(self) -> list[dict[str, Any]]:
        """Return the parsed files in the order of their names."""
        return list(self._found.values())


@dataclass
class _Probe:
    definition: Mapping[str, Any] = field(default_factory=dict)
    evaluated: dict[int, tuple[float | None, bool | None]] = field(default_factory=dict)
    """Value and verdict by step."""


def probes_of(
    defined: Sequence[Any],
    evaluations: Sequence[Mapping[str, Any]],
    trained: Mapping[str, tuple[float, float]],
    tokens_at: StepsTo,
    seconds_at: StepsTo,
) -> list[dict[str, Any]]:
    """Return all probes for the page.

    `defined`: by the run's start event; `trained`: step and value of each probe that the run itself asks.
    """
    probes: dict[str, _Probe] = {}
    for definition in [*defined, *(one for content in evaluations for one in _list(content, "probes"))]:
        if isinstance(definition, dict) and isinstance(definition.get("name"), str):
            probes.setdefault(definition["name"], _Probe(definition))
    for content in evaluations:
        for row in _list(content, "rows"):
            _add_row(probes, row)
    for name in trained:
        probes.setdefault(name, _Probe())
    return [_shown(name, probe, trained.get(name), tokens_at, seconds_at) for name, probe in probes.items()]


def _list(content: Mapping[str, Any], key: str) -> list[Any]:
    found = content.get(key)
    return found if isinstance(found, list) else []


def _add_row(probes: dict[str, _Probe], row: Any) -> None:
    if not isinstance(row, dict) or not isinstance(row.get("step"), int) or not isinstance(row.get("values"), dict):
        return
    passed = row.get("passed")
    for name, value in row["values"].items():
        verdict = passed.get(name) if isinstance(passed, dict) else None
        probe = probes.setdefault(name, _Probe())
        probe.evaluated[row["step"]] = (_number(value), verdict if isinstance(verdict, bool) else None)


def _shown(
    name: str, probe: _Probe, trained: tuple[float, float] | None, tokens_at: StepsTo, seconds_at: StepsTo
) -> dict[str, Any]:
    bounds = {key: _number(probe.definition.get(key)) for key in ("at_least", "at_most")}
    from_step = _number(probe.definition.get("from_step")) or 0
    step, value, passed = None, None, None
    if probe.evaluated:
        step = float(max(probe.evaluated))
        value, passed = probe.evaluated[int(step)]
    if trained is not None and (step is None or trained[0] >= step):
        # At the same step, the verdict of an evaluation is better: it has also checked the answer's form.
        keeps_verdict = step == trained[0] and passed is not None
        step, value = trained
        passed = passed if keeps_verdict else _is_met(value, step, from_step, **bounds)
    steps = sorted(probe.evaluated) if trained is None else []
    return {
        "name": name,
        "kind": probe.definition.get("kind"),
        **bounds,
        "from_step": from_step,
        "value": value,
        "step": step,
        "passed": passed,
        "points": {
            "step": steps,
            "tokens": tokens_at(steps),
            "seconds": seconds_at(steps),
            "value": [probe.evaluated[step][0] for step in steps],
        },
    }


def _is_met(value: float, step: float, from_step: float, at_least: float | None, at_most: float | None) -> bool | None:
    if step < from_step or (at_least is None and at_most is None):
        return None
    return (at_least is None or value >= at_least) and (at_most is None or value <= at_most)


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
