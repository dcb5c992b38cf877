"""Tests for score drops, their standard errors, and how they are reported."""

import math

import pytest

from z2all_ds.base.reports import plain as plain_types
from z2all_ds.evaluate.harness.report import ScoreRow, compare, score_table, verdicts


def test_each_question_is_compared_with_its_reshaped_form() -> None:
    drop = compare([1, 1, 1, 0], [[1, 0, 0, 1]])
    assert drop.score == 0.5
    assert drop.drop == 0.25
    # The differences are 0, 1, 1, -1: mean 1/4, sum of squared deviations 11/4, divided by 3 and then by 4.
    assert drop.drop_standard_error == pytest.approx(math.sqrt(11 / 4 / 3 / 4))
    assert drop.right_then_wrong_questions == (1, 2)
    assert not drop.beyond_two_standard_errors


def test_several_shuffles_are_averaged() -> None:
    drop = compare([1, 1], [[1, 0], [0, 0], [1, 1]])
    assert drop.score == pytest.approx(0.5)
    assert drop.right_then_wrong_questions == (1,), "the first question is right in two of three orders"


@pytest.mark.parametrize(
    ("plain", "reshaped", "significant"),
    [
        ([1.0] * 20, [0.0] * 20, True),
        ([1.0] * 20, [1.0] * 20, False),
        ([0.0] * 20, [1.0] * 20, False),
        ([1.0] * 20, [0.0] * 3 + [1.0] * 17, False),
        ([1.0] * 20, [0.0] * 5 + [1.0] * 15, True),
        ([1.0], [0.0], False),
    ],
)
def test_only_drops_beyond_two_standard_errors_are_reported(
    plain: list[float], reshaped: list[float], significant: bool
) -> None:
    drop = compare(plain, [reshaped])
    assert drop.beyond_two_standard_errors == significant
    found = verdicts([ScoreRow("school", "acc", len(plain), 1.0, None, 0.25, {"letters": drop})])
    assert bool(found) == significant
    assert not found or ("school" in found[0] and "letters" in found[0] and "memorised" in found[0])


def test_scores_as_a_table_and_as_json() -> None:
    rows = [
        ScoreRow("school", "acc", 4, 0.75, 0.25, 0.25, {"letters": compare([1, 1, 1, 0], [[1, 0, 0, 1]])}),
        ScoreRow("text", "word_perplexity", 4, 123.4, None, None, {}),
    ]
    table = score_table(rows, ["letters"])
    assert [*table.columns[-3:]] == ["letters", "drop", "lost"]
    school, text = table.rows
    assert school == ["school", "acc", "4", "75.0 ± 25.0", "25.0", "50.0", "25.0 ± 47.9", "2 of 4"]
    assert text[3:] == ["123.4", "-", "-", "-", "-"]
    content = plain_types(rows[0])
    assert content["reshaped"]["letters"]["right_then_wrong_questions"] == [1, 2]
    assert content["reshaped"]["letters"]["beyond_two_standard_errors"] is False
