"""Tests for reshaped questions: the right option stays known, and nothing else changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.evaluate.harness.questions import (
    Question,
    relabel_lists,
    relabel_prompt,
    shows_options,
    shuffled,
    with_chinese_labels,
    with_others_wrong,
)

CAPITAL = Question("中国的首都是哪座城市？", ("上海", "北京", "广州", "成都"), 1, ("A", "B", "C", "D"))
CAPITAL_PROMPT = "中国的首都是哪座城市？\nA. 上海\nB. 北京\nC. 广州\nD. 成都\n答案："

questions = st.lists(st.text(min_size=1), min_size=1, max_size=20, unique=True).flatmap(
    lambda options: st.builds(
        Question,
        text=st.text(),
        options=st.just(tuple(options)),
        gold=st.integers(0, len(options) - 1),
        labels=st.just(tuple("ABCDEFGHIJKLMNOPQRST"[: len(options)])),
    )
)


def test_letters_become_chinese_numerals() -> None:
    renamed = with_chinese_labels(CAPITAL)
    assert renamed.labels == ("一", "二", "三", "四")
    assert (renamed.options, renamed.gold) == (CAPITAL.options, CAPITAL.gold)
    many = Question("?", tuple("abcdefghijkl"), 0, tuple("ABCDEFGHIJKL"))
    assert with_chinese_labels(many).labels[-3:] == ("十", "十一", "十二")


@pytest.mark.parametrize(
    ("text", "wording", "expected"),
    [
        ("中国的首都是哪座城市？", None, "其他答案全错"),
        ("Which city is the capital?", None, "all other answers are wrong"),
        ("Which city is the capital?", "None of these", "None of these"),
    ],
)
def test_the_right_option_is_replaced_by_others_are_wrong(text: str, wording: str | None, expected: str) -> None:
    question = Question(text, ("a", "b", "c"), 2, ("A", "B", "C"))
    assert with_others_wrong(question, wording) == Question(text, ("a", "b", expected), 2, ("A", "B", "C"))


@given(questions, st.integers(0, 5))
def test_shuffled_options_are_the_same_in_another_order(question: Question, seed: int) -> None:
    moved = shuffled(question, seed)
    assert sorted(moved.options) == sorted(question.options)
    assert moved.options[moved.gold] == question.options[question.gold]
    assert (moved.labels, moved.text) == (question.labels, question.text)
    assert (moved.options == question.options) == (len(question.options) == 1)
    assert moved == shuffled(question, seed)


def test_shuffles_differ_by_seed_and_reach_every_position() -> None:
    places = {shuffled(CAPITAL, seed).gold for seed in range(40)}
    assert places == {0, 1, 2, 3}


def test_only_labels_before_their_options_are_renamed() -> None:
    expected = "中国的首都是哪座城市？\n一. 上海\n二. 北京\n三. 广州\n四. 成都\n答案："
    assert relabel_prompt(CAPITAL_PROMPT, CAPITAL, "一二三四") == expected
    vitamin = Question("Where is vitamin A, or A and B?", ("in A4 paper", "in carrots"), 1, ("A", "B"))
    prompt = f"{vitamin.text}\n(A) in A4 paper\n(B) in carrots\nA or B:"
    assert relabel_prompt(prompt, vitamin, "一二") == (
        "Where is vitamin A, or A and B?\n(一) in A4 paper\n(二) in carrots\n一 or 二:"
    )


def test_options_that_also_occur_in_the_question_are_not_renamed_there() -> None:
    question = Question("A: 3 or B: 4?", ("3", "4"), 0, ("A", "B"))
    assert relabel_prompt("A: 3 or B: 4?\nA: 3\nB: 4\n", question, "一二") == "A: 3 or B: 4?\n一: 3\n二: 4\n"


def test_labels_of_a_question_without_text_are_renamed() -> None:
    question = Question(" ", ("3", "4"), 0, ("A", "B"))
    assert relabel_prompt(" \nA: 3\nB: 4\nA or B:", question, "一二") == " \n一: 3\n二: 4\n一 or 二:"


def test_a_prompt_without_labels_is_not_renamed() -> None:
    assert relabel_prompt("中国的首都是哪座城市？上海、北京、广州、成都", CAPITAL, "一二三四") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Answer with A, B, C or D.", "Answer with 一, 二, 三 or 四."),
        ("(A/B/C/D)", "(一/二/三/四)"),
        ("请从A、B、C、D中选择", "请从一、二、三、四中选择"),
        ("A, B or C", "A, B or C"),
        ("ABCD", "ABCD"),
    ],
)
def test_lists_of_all_labels_are_renamed(text: str, expected: str) -> None:
    assert relabel_lists(text, "ABCD", "一二三四") == expected


def test_a_prompt_that_shows_the_options_is_recognized() -> None:
    assert shows_options(CAPITAL_PROMPT, CAPITAL)
    assert not shows_options("中国的首都是哪座城市？答案：", CAPITAL)
