"""Results of probes: as a table, as JSON, and as the file in a run folder that the board reads."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from z2all_ds.base.atomic import make_folder, write_whole
from z2all_ds.base.console import say
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.json_text import load_json
from z2all_ds.base.paths import full_path
from z2all_ds.base.reports import Shown, Table, plain
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.evaluate.probe_rows import summary_line
from z2all_ds.evaluate.probes import Probe

MAX_COLUMNS = 6
"""Checkpoints in a table: the first, the last and some in between. The JSON has all."""

MISSED = (
    "FAIL: the value misses what the probe file expects of a trained model. A model that is small or has trained "
    "little misses most of it: compare the values of its checkpoints, or set your own expectations in a copy."
)


@dataclass(frozen=True)
class ProbeAnswer:
    """A model's answer to one probe."""

    value: float
    passed: bool | None
    """None if nothing is expected."""
    details: dict[str, Any]


@dataclass(frozen=True)
class ModelAnswers:
    """A model's answers to all probes."""

    label: str
    step: int | None
    answers: dict[str, ProbeAnswer]
    too_long: dict[str, int] = field(default_factory=dict)
    """Probes without an answer, because they have more tokens than the model can read -> their tokens."""

    @property
    def passed(self) -> dict[str, bool]:
        """Whether each judged probe passed."""
        return {name: answer.passed for name, answer in self.answers.items() if answer.passed is not None}


@dataclass(frozen=True)
class ProbeResults:
    """Answers of several models or runs: `series` has one list per model or run, with its checkpoints oldest first."""

    file: str
    probes: Sequence[Probe]
    series: list[list[ModelAnswers]]


def failed_probes(results: ProbeResults) -> list[str]:
    """Return the probes that the last checkpoint of any model failed."""
    failed = [name for series in results.series for name, is_met in series[-1].passed.items() if not is_met]
    return list(dict.fromkeys(failed))


def file_content(
    file: str, probes: Sequence[Probe], series: Sequence[ModelAnswers], with_details: bool = False
) -> dict[str, Any]:
    """Return the probes and one row per checkpoint, as stored in a run folder."""
    rows: list[dict[str, Any]] = []
    for one in series:
        values = plain({name: answer.value for name, answer in one.answers.items()})
        rows.append({"step": one.step, "label": one.label, "values": values, "passed": one.passed})
        if with_details:
            rows[-1]["details"] = {name: answer.details for name, answer in one.answers.items()}
            rows[-1] |= {"too_long": one.too_long} if one.too_long else {}
    definitions, questions = [probe.definition for probe in probes], [probe.question for probe in probes]
    return {"file": file, "probes": definitions, "questions": questions, "rows": rows}


class StoredAnswers:
    """The file with a run's answers to the probes of one file. Rows remain when their checkpoints are deleted."""

    def __init__(self, run: Path, file: str, probes: Sequence[Probe]) -> None:
        """Read earlier rows. Raise if they belong to a different probe file of the same name."""
        self._file, self._probes = file, probes
        self._path = RunFolder(run).evaluations / f"probes_{Path(file).stem}.json"
        earlier = _read_json(self._path)
        self._rows = [row for row in earlier.get("rows", []) if isinstance(row, dict)]
        if not earlier or earlier.get("questions") == [probe.question for probe in probes]:
            return
        other = earlier.get("file")
        if isinstance(other, str) and full_path(other) != full_path(file):
            rule = f"holds the results of {other}"
            raise ConfigError(f"file {self._path}", rule, "Rename one of the two probe files.")
        self._rows = []
        say(f"{self._path.name} starts over: the probes of {file} have changed")

    def write(self, series: Sequence[ModelAnswers]) -> None:
        """Write the answers, together with the rows of steps whose checkpoints no longer exist."""
        content = file_content(self._file, self._probes, series)
        rows = {row["step"]: row for row in [*self._rows, *content["rows"]] if isinstance(row.get("step"), int)}
        content["rows"] = [rows[step] for step in sorted(rows)]
        make_folder(self._path.parent)
        write_whole(self._path, json.dumps(content, indent=1, ensure_ascii=False))


def _read_json(path: Path) -> dict[str, Any]:
    """Return the content; empty if the file is missing or unreadable."""
    try:
        content = load_json(read_regular(path))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and isinstance(content.get("rows", []), list) else {}


def content_of(results: ProbeResults) -> list[dict[str, Any]]:
    """Return the content of the files with the details of every answer, for JSON."""
    return [file_content(results.file, results.probes, series, with_details=True) for series in results.series]


def describe(results: ProbeResults) -> Shown:
    """Yield a table and a summary line for each model or run."""
    for series in results.series:
        count = min(len(series), MAX_COLUMNS)
        shown = [series[round(number * (len(series) - 1) / max(count - 1, 1))] for number in range(count)]
        steps = ["value" if one.step is None else f"step {one.step:,}" for one in shown]
        rows = []
        for probe in results.probes:
            head = [probe.name, probe.kind, _format_bounds(probe)]
            if tokens := max(one.too_long.get(probe.name, 0) for one in shown):
                rows.append([*head, f"skipped: has {tokens} tokens, too many for this model"])
                continue
            answers = [one.answers[probe.name] for one in shown]
            verdict = {None: "", True: "pass", False: "FAIL"}[answers[-1].passed]
            values = [_format_value(probe, answer.value) for answer in answers]
            rows.append([*head, *values, verdict])
        yield Table(("probe", "kind", "expected", *steps, ""), rows, "lllr")
        if count < len(series):
            yield f"{count} of {len(series)} checkpoints; --json has all"
        if not all(series[-1].passed.values()):
            yield MISSED
            yield from _progress(results.probes, series)
        yield f"{series[-1].label}: probes {summary_line(series[-1].passed, len(series[-1].answers))}"


def _progress(probes: Sequence[Probe], series: Sequence[ModelAnswers]) -> Shown:
    """Yield how many missed probes have come closer to their expectation since the first checkpoint."""
    first, last = series[0], series[-1]
    missed = [probe for probe in probes if last.passed.get(probe.name) is False]
    closer = [probe for probe in missed if _distance(probe, last) < _distance(probe, first)]
    if first is not last:
        since = "since the first" if first.step is None else f"since step {first.step:,}"
        yield f"{len(closer)} of the {len(missed)} missed probes have come closer to what is expected {since}"


def _distance(probe: Probe, answers: ModelAnswers) -> float:
    """Return how far a value is outside the expected range."""
    value = answers.answers[probe.name].value
    too_low = probe.at_least - value if probe.at_least is not None else 0.0
    too_high = value - probe.at_most if probe.at_most is not None else 0.0
    return max(too_low, too_high, 0.0)


def _format_value(probe: Probe, value: float) -> str:
    if probe.is_probability:
        return f"{value:.4f}" if value >= 0.001 else f"{value:.1e}"
    return f"{value:+.3f}" if probe.kind == "compare" else f"{value:,.2f}"


def _format_bounds(probe: Probe) -> str:
    parts = [f"≥ {probe.at_least:g}"] if probe.at_least is not None else []
    parts += [f"≤ {probe.at_most:g}"] if probe.at_most is not None else []
    return ", ".join(parts)
