"""What a benchmark run says: scores, and how much of them is left when the questions are reshaped.

A drop is the mean over questions of (right as it stands) minus (right when reshaped), so that each question is compared
with itself, with the standard error of that mean. Beyond two of them chance is an unlikely reason.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from z2all_ds.base.reports import Table

DOUBTFUL_BEYOND_STANDARD_ERRORS = 2.0
ALL_TASKS = "all"


@dataclass(frozen=True)
class Drop:
    """What one reshaping costs. Shares from 0 to 1; `drop` is plain minus reshaped."""

    score: float
    drop: float
    standard_error: float | None
    """None with fewer than two questions."""
    lost: tuple[int, ...]
    """Numbers of the questions right as they stand and wrong when reshaped (in more than half of several shuffles)."""
    questions: int

    @property
    def is_doubtful(self) -> bool:
        if self.standard_error is None:
            return False
        return self.drop > 0 and self.drop > DOUBTFUL_BEYOND_STANDARD_ERRORS * self.standard_error


@dataclass(frozen=True)
class ScoreRow:
    """One metric of one task."""

    task: str
    metric: str
    questions: int
    score: float
    standard_error: float | None
    chance: float | None
    drops: dict[str, Drop]


def compare(plain: Sequence[float], reshaped: Sequence[Sequence[float]]) -> Drop:
    """`plain[i]` is question i's score as it stands, `reshaped[k][i]` its score in the k-th reshaped copy."""
    means = [sum(scores) / len(scores) for scores in zip(*reshaped, strict=True)]
    differences = [before - after for before, after in zip(plain, means, strict=True)]
    lost = tuple(i for i, (before, after) in enumerate(zip(plain, means, strict=True)) if before >= 0.5 > after)
    drop, error = mean_and_error(differences)
    return Drop(sum(means) / len(means), drop, error, lost, len(plain))


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error (None for fewer than two values)."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, None
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)


def sentences(rows: Sequence[ScoreRow]) -> list[str]:
    """In words, where a drop is beyond what chance explains."""
    return [
        f"{row.task} ({row.metric}): {points(drop.drop)} points fewer when reshaped by {name} "
        f"({len(drop.lost)} of {drop.questions} questions right before and wrong then): "
        "answers may be memorised"
        for row in rows
        for name, drop in row.drops.items()
        if drop.is_doubtful
    ]


def points(share: float) -> str:
    """0.257 -> '25.7'."""
    return f"{100 * share:.1f}"


def with_error(share: float, error: float | None) -> str:
    return points(share) if error is None else f"{points(share)} ± {points(error)}"


def score_table(rows: Sequence[ScoreRow], reshapings: Sequence[str]) -> Table:
    """Returns scores in per cent; for each reshaping the score, the drop in points and the questions lost."""
    table = []
    for row in rows:
        cells = [row.task, row.metric, f"{row.questions:,}"]
        cells += [_figure(row), "-" if row.chance is None else points(row.chance)]
        for drop in map(row.drops.get, reshapings):
            if drop is None:
                cells += ["-", "-", "-"]
            else:
                lost = f"{len(drop.lost)} of {drop.questions}"
                cells += [points(drop.score), with_error(drop.drop, drop.standard_error), lost]
        table.append(cells)
    reshaped = [heading for name in reshapings for heading in (name, "drop", "lost")]
    return Table(("task", "metric", "questions", "plain", "chance", *reshaped), table, "llr")


def _figure(row: ScoreRow) -> str:
    """In per cent where it is a share; perplexities and the like as they are."""
    if 0 <= row.score <= 1 and not any(word in row.metric for word in ("perplexity", "bits", "brier")):
        return with_error(row.score, row.standard_error)
    return f"{row.score:.4g}" if row.standard_error is None else f"{row.score:.4g} ± {row.standard_error:.2g}"


def row_content(row: ScoreRow) -> dict[str, Any]:
    """Returns the row for JSON."""
    drops = {
        name: {
            "score": drop.score,
            "drop": drop.drop,
            "drop_standard_error": drop.standard_error,
            "right_then_wrong": len(drop.lost),
            "right_then_wrong_questions": list(drop.lost),
            "beyond_two_standard_errors": drop.is_doubtful,
        }
        for name, drop in row.drops.items()
    }
    return {
        "task": row.task,
        "metric": row.metric,
        "questions": row.questions,
        "score": row.score,
        "standard_error": row.standard_error,
        "chance": row.chance,
        "reshaped": drops,
    }
