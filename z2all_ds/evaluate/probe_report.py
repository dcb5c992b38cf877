"""What probes found, as a table, as JSON, and as the file that the board reads beside metrics.jsonl."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from z2all_ds.base.reports import Shown, Table, plain
from z2all_ds.evaluate.probe_rows import verdict_line
from z2all_ds.evaluate.probes import Probe

MOST_COLUMNS = 6
"""Of a table: of more checkpoints, the first, the last, and some between them; the JSON has all."""


@dataclass(frozen=True)
class Answer:
    """To one probe."""

    value: float
    passed: bool | None
    """None where nothing is expected."""
    details: dict[str, Any]


@dataclass(frozen=True)
class ModelAnswers:
    """Of one model to all probes."""

    label: str
    step: int | None
    answers: dict[str, Answer]

    @property
    def passed(self) -> dict[str, bool]:
        """Of the probes that are judged."""
        return {name: answer.passed for name, answer in self.answers.items() if answer.passed is not None}


@dataclass(frozen=True)
class AskedModels:
    """Of each model that was named its answers, of a run those of its checkpoints, the oldest first."""

    file: str
    probes: Sequence[Probe]
    lines: list[list[ModelAnswers]]


def failures_at_last(asked: AskedModels) -> list[str]:
    """Probes that are not as expected, of any of the models in its last state."""
    failed = [name for line in asked.lines for name, is_met in line[-1].passed.items() if not is_met]
    return list(dict.fromkeys(failed))


def as_file(file: str, probes: Sequence[Probe], line: Sequence[ModelAnswers]) -> dict[str, Any]:
    """Of one run or model: what was asked, and a row for each checkpoint."""
    return {
        "file": file,
        "probes": [probe.definition for probe in probes],
        "questions": [probe.question for probe in probes],
        "rows": [
            {
                "step": one.step,
                "label": one.label,
                "values": plain({name: answer.value for name, answer in one.answers.items()}),
                "passed": one.passed,
            }
            for one in line
        ],
    }


def content_of(asked: AskedModels) -> list[dict[str, Any]]:
    """Returns the content of the files, with the details of every answer, for JSON."""
    models = []
    for line in asked.lines:
        content = as_file(asked.file, asked.probes, line)
        for row, one in zip(content["rows"], line, strict=True):
            row["details"] = {name: answer.details for name, answer in one.answers.items()}
        models.append(content)
    return models


def describe(asked: AskedModels) -> Shown:
    """Yields a table of each run or model, and a line that sums it up."""
    for line in asked.lines:
        shown, last = _spread(line), line[-1]
        steps = ["value" if one.step is None else f"step {one.step:,}" for one in shown]
        rows = []
        for probe in asked.probes:
            answers = [one.answers[probe.name] for one in shown]
            verdict = {None: "", True: "pass", False: "FAIL"}[answers[-1].passed]
            values = [_shown(probe, answer.value) for answer in answers]
            rows.append([probe.name, probe.kind, _expected(probe), *values, verdict])
        yield Table(("probe", "kind", "expected", *steps, ""), rows, "lllr")
        if len(shown) < len(line):
            yield f"{len(shown)} of {len(line)} checkpoints; --json has all"
        yield f"{last.label}: probes {verdict_line(last.passed, len(last.answers))}"


def _spread(line: list[ModelAnswers]) -> list[ModelAnswers]:
    if len(line) <= MOST_COLUMNS:
        return line
    places = [round(number * (len(line) - 1) / (MOST_COLUMNS - 1)) for number in range(MOST_COLUMNS)]
    return [line[place] for place in places]


def _shown(probe: Probe, value: float) -> str:
    if probe.is_probability:
        return f"{value:.4f}" if value >= 0.001 else f"{value:.1e}"
    return f"{value:+.3f}" if probe.kind == "compare" else f"{value:,.2f}"


def _expected(probe: Probe) -> str:
    parts = [f"≥ {probe.at_least:g}"] if probe.at_least is not None else []
    parts += [f"≤ {probe.at_most:g}"] if probe.at_most is not None else []
    return ", ".join(parts)
