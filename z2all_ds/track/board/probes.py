"""Probes as the board shows them: what each asks and expects, what it found last, and curves of later evaluations.

A run writes the values of its probes beside the loss, and what they expect into its start. `z2all evaluate probes`
asks the kept checkpoints afterwards and leaves a file of the same in the run's folder.
"""

import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from z2all_ds.track.board.files import Files
from z2all_ds.track.tables import parse_line

LONGEST_BYTES = 16 << 20
MOST_FILES = 32
SETTLED_SECONDS = 2.0
"""A folder that was changed just now may change again within the same tick of its clock."""
StepsTo = Callable[[Sequence[float]], list[float | None]]


class EvaluationFiles:
    """The files that `z2all evaluate probes` leaves in a run's folder; they may come, and be written anew, later."""

    def __init__(self, files: Files, folder: str) -> None:
        self._files, self._folder = files, folder
        self._seen: list[float] | None = None
        self._signs: dict[str, list[float]] = {}
        self._found: dict[str, dict[str, Any]] = {}
        self.version = 0
        """Goes up where there is something new."""

    def look(self, sign: list[float], now_there: float) -> None:
        """Given the folder's sign of just now; a file that is renamed into it changes that."""
        if sign == self._seen:
            return
        names = [name for name in self._files.file_names(self._folder) if _is_of_probes(name)][:MOST_FILES]
        paths = {name: posixpath.join(self._folder, name) for name in names}
        signs = dict(zip(names, self._files.signs(list(paths.values()))[1], strict=True)) if names else {}
        changed = [name for name in names if signs[name] != self._signs.get(name)]
        read = {name: parse_line(self._files.read(paths[name], 0, LONGEST_BYTES)) for name in changed}
        if changed or self._found.keys() - signs.keys():
            kept = {name: content for name, content in self._found.items() if name in signs}
            self._found = kept | {name: content for name, content in read.items() if content is not None}
            self.version += 1
        self._signs = signs
        self._seen = sign if now_there - sign[1] > SETTLED_SECONDS else None

    def contents(self) -> list[dict[str, Any]]:
        """In the order of their names."""
        found = self._found
        return [found[name] for name in sorted(found)]


def _is_of_probes(name: str) -> bool:
    return name.startswith("probes_") and name.endswith(".json")


@dataclass
class _Row:
    """One probe, as far as it is known."""

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
    """`defined`: by the run's start; `trained`: step and value of each probe that the run asks itself."""
    rows: dict[str, _Row] = {}
    for definition in [*defined, *(one for content in evaluations for one in _list(content, "probes"))]:
        if isinstance(definition, dict) and isinstance(definition.get("name"), str):
            rows.setdefault(definition["name"], _Row(definition))
    for content in evaluations:
        for row in _list(content, "rows"):
            _take(rows, row)
    for name in trained:
        rows.setdefault(name, _Row())
    return [_shown(name, row, trained.get(name), tokens_at, seconds_at) for name, row in rows.items()]


def _list(content: Mapping[str, Any], key: str) -> list[Any]:
    found = content.get(key)
    return found if isinstance(found, list) else []


def _take(rows: dict[str, _Row], row: Any) -> None:
    if not isinstance(row, dict) or not isinstance(row.get("step"), int) or not isinstance(row.get("values"), dict):
        return
    passed = row.get("passed")
    for name, value in row["values"].items():
        verdict = passed.get(name) if isinstance(passed, dict) else None
        known = rows.setdefault(name, _Row())
        known.evaluated[row["step"]] = (_number(value), verdict if isinstance(verdict, bool) else None)


def _shown(
    name: str, row: _Row, trained: tuple[float, float] | None, tokens_at: StepsTo, seconds_at: StepsTo
) -> dict[str, Any]:
    bounds = {key: _number(row.definition.get(key)) for key in ("at_least", "at_most")}
    from_step = _number(row.definition.get("from_step")) or 0
    step, value, passed = None, None, None
    if row.evaluated:
        step = float(max(row.evaluated))
        value, passed = row.evaluated[int(step)]
    if trained is not None and (step is None or trained[0] >= step):
        # Of the same step, an evaluation's verdict knows more: it has read the answer too.
        knows_more = step == trained[0] and passed is not None
        step, value = trained
        passed = passed if knows_more else _is_met(value, step, from_step, **bounds)
    steps = sorted(row.evaluated) if trained is None else []
    return {
        "name": name,
        "kind": row.definition.get("kind"),
        **bounds,
        "from_step": from_step,
        "value": value,
        "step": step,
        "passed": passed,
        "points": {
            "step": steps,
            "tokens": tokens_at(steps),
            "seconds": seconds_at(steps),
            "value": [row.evaluated[step][0] for step in steps],
        },
    }


def _is_met(value: float, step: float, from_step: float, at_least: float | None, at_most: float | None) -> bool | None:
    if step < from_step or (at_least is None and at_most is None):
        return None
    return (at_least is None or value >= at_least) and (at_most is None or value <= at_most)


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
