"""Scores of a benchmark run, and how much they drop when the questions are reshaped.

A drop is the mean over questions of (score of the plain question) minus (score of the reshaped one), so that each
question is compared with itself, with the standard error of that mean. A drop above two standard errors is unlikely to
be chance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from z2all_ds.base.reports import Table

SIGNIFICANT_STANDARD_ERRORS = 2.0


@dataclass(frozen=True)
class Drop:
    """Effect of one reshaping. Fractions from 0 to 1; field names are those of the JSON."""

    score: float
    drop: float
    """Plain score minus reshaped score."""
    drop_standard_error: float | None
    """None with fewer than two questions."""
    right_then_wrong: int
    right_then_wrong_questions: tuple[int, ...]
    """Questions right when plain and wrong when reshaped (in more than half of several shuffles)."""
    beyond_two_standard_errors: bool


@dataclass(frozen=True)
class ScoreRow:
    """One metric of one task. Field names are those of the JSON."""

    task: str
    metric: str
    questions: int
    score: float
    standard_error: float | None
    chance: float | None
    """Score of guessing."""
    reshaped: dict[str, Drop]


def compare(plain: Sequence[float], reshaped: Sequence[Sequence[float]]) -> Drop:
    """Compare `plain[i]`, the score of question i, with `reshaped[k][i]`, its score in the k-th reshaped copy."""
    means = [sum(scores) / len(scores) for scores in zip(*reshaped, strict=True)]
    pairs = list(zip(plain, means, strict=True))
    lost = tuple(number for number, (before, after) in enumerate(pairs) if before >= 0.5 > after)
    drop, error = mean_and_error([before - after for before, after in pairs])
    is_significant = error is not None and drop > 0 and drop > SIGNIFICANT_STANDARD_ERRORS * error
    return Drop(sum(means) / len(means), drop, error, len(lost), lost, is_significant)


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error (None for fewer than two values)."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, None
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)


def verdicts(rows: Sequence[ScoreRow]) -> list[str]:
    """Return one sentence for each drop that chance does not explain."""
    return [
        f"{row.task} ({row.metric}): {_percent(drop.drop)} points lower when reshaped by {name} "
        f"({drop.right_then_wrong} of {row.questions} questions right before and wrong after): "
        "answers may be memorised"
        for row in rows
        for name, drop in row.reshaped.items()
        if drop.beyond_two_standard_errors
    ]


def score_table(rows: Sequence[ScoreRow], reshapings: Sequence[str]) -> Table:
    """Return scores in per cent; for each reshaping the score, the drop in points and the questions lost."""
    table = []
    for row in rows:
        chance = "-" if row.chance is None else _percent(row.chance)
        cells = [row.task, row.metric, f"{row.questions:,}", _plain_score(row), chance]
        for drop in map(row.reshaped.get, reshapings):
            if drop is None:
                cells += ["-", "-", "-"]
            else:
                lost = f"{drop.right_then_wrong} of {row.questions}"
                cells += [_percent(drop.score), _percent(drop.drop, drop.drop_standard_error), lost]
        table.append(cells)
    reshaped = [heading for name in reshapings for heading in (name, "drop", "lost")]
    return Table(("task", "metric", "questions", "plain", "chance", *reshaped), table, "llr")


def _percent(fraction: float, error: float | None = None) -> str:
    return f"{100 * fraction:.1f}" if error is None else f"{100 * fraction:.1f} ± {100 * error:.1f}"


def _plain_score(row: ScoreRow) -> str:
    """Return the score in per cent if it is a fraction, otherwise (perplexities and the like) as it is."""
    if 0 <= row.score <= 1 and not any(word in row.metric for word in ("perplexity", "bits", "brier")):
        return _percent(row.score, row.standard_error)
    return f"{row.score:.4g}" if row.standard_error is None else f"{row.score:.4g} ± {row.standard_error:.2g}"
