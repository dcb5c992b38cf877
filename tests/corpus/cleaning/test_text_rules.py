"""Tests of the altering steps: examples in Chinese and English, texts that must not change, and idempotence."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.corpus.cleaning.text_rules import (
    control_characters,
    has_cjk_bytes,
    repeated_punctuation,
    space_before_cjk,
)

FAMILY = "👨\u200d👩\u200d👧"
RAINBOW = "🏳\ufe0f\u200d🌈"
ENGLAND = "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"
STEPS = (control_characters, space_before_cjk, repeated_punctuation)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("one\r\ntwo\rthree\x0cfour\u2028five\x85six", "one\ntwo\nthree\nfour\nfive\nsix"),
        ("one\r\u200b\ntwo", "one\ntwo"),
        ("be\x00ll\x07 de\x7fl c\x9b1", "bell del c1"),
        ("\ufeff他说\u200b：\u202e你好\u2066。\ue123", "他说：你好。"),
        ("soft\xadhyphen wo\u2060rd", "softhyphen word"),
        ("a\u200db \u200c中\u200d文", "ab 中文"),
        ("\U000e0068\U000e0069hidden\U000e0021", "hidden"),
        ("❤\ufe0f\u200d\u200d\u200c🔥", "❤\ufe0f\u200d🔥"),
        ("👨\u200dtext", "👨text"),
        ("\U000f1234x\U0010fffdy\ufdd0z\uffff", "xyz"),
    ],
)
def test_control_characters_are_removed_and_line_breaks_unified(before: str, after: str) -> None:
    assert control_characters(before) == after


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tabs\tand\nlines\n",
        "中文，English, 日本語。한국어",
        FAMILY,
        RAINBOW,
        ENGLAND,
        "می\u200cخواهم",  # Persian: a non-joiner inside a word
        "ക്\u200d ന\u200d.",  # Malayalam: a word may end with a joiner
        "क्\u200dष",
        "ಪಾಯಿಂಟ್\u200c",
        "nbsp\xa0stays，全角　空格",
        "\U00020000\U0002a6df",
    ],
)
def test_visible_text_and_meaningful_joiners_are_not_changed(text: str) -> None:
    assert control_characters(text) is text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("我 们 在　这 里 。", "我们在这里。"),
        ("done ，ok", "done，ok"),
        ("他说 ： “ 好 ” 。", "他说： “ 好 ”。"),
        ("日 本 語 カナ", "日本語カナ"),
        ("标题\n　　段首 不动", "标题\n　　段首不动"),
        ("全自动 （FAI） 安装", "全自动（FAI）安装"),
        ("𠀀 𠀁", "𠀀𠀁"),
    ],
)
def test_spaces_before_cjk_characters_are_removed(before: str, after: str) -> None:
    assert space_before_cjk(before) == after


@pytest.mark.parametrize(
    "text",
    [
        "Plain English , with blanks .",
        "　　段首缩进\n    四格",
        "RAID 和 LVM",
        "Python 《手册》",
        "甲\t乙 \t丙",
        "甲 \n 乙",
        "한국어 띄어쓰기 안 함",
        "- 项目\n1. 第一\n# 标题",
        "he said “好” — yes",
    ],
)
def test_indentation_and_spaces_after_latin_words_are_not_changed(text: str) -> None:
    assert space_before_cjk(text) is text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("什么。。。。。。？？？？？", "什么。。。？？？"),
        ("What?!!!!!! Nooo.......", "What?!!! Nooo..."),
        ("等等…………………好————吧", "等等……好——吧"),
        ("好的~~~~~~~", "好的~~~"),
        ("Chapter 1 ........ 7", "Chapter 1 ... 7"),
        ("真的！！！！\n—————\n啊", "真的！！！\n—————\n啊"),
    ],
)
def test_runs_of_repeated_punctuation_are_shortened(before: str, after: str) -> None:
    assert repeated_punctuation(before) == after


@pytest.mark.parametrize(
    "text",
    [
        "……——。。。!!!",
        "-----BEGIN KEY-----\n=======\n| --- | ----- |\n#### four\n*****\n_____",
        "~~~~\ncode\n~~~~",
        "f(g(h(i(x)))) \\\\\\\\server ////",
        "11111111 aaaaaaa 哈哈哈哈哈哈",
        "!?!?!?!?",
        "————————",
    ],
)
def test_markup_code_and_short_runs_of_punctuation_are_not_changed(text: str) -> None:
    assert repeated_punctuation(text) is text


SEEN_BY_RULES = (
    "\x00\x07\t\n\r\x0b\x0c\x1b\x1f \x7f\x85\x9b\xa0\xad\u061c\u200b\u200c\u200d\u200e\u2028\u202e\u202f\u2060\u2069"
    "\u3000\ue000\ufdd0\ufeff\uffff\U000e0001\U000e0067\U000e007f\U0001f3f4\U000f0000❤\ufe0f👨🔥1aZé"
    "مक्ക한中文𠀀カ。，、！（）《》：“”…—⋯～~!?.,;-=·＃[]P\\"
)
texts = st.text(st.one_of(st.sampled_from(SEEN_BY_RULES), st.characters()), max_size=60)
runs = st.lists(st.tuples(st.sampled_from(SEEN_BY_RULES), st.integers(1, 6)), max_size=14).map(
    lambda pairs: "".join(char * times for char, times in pairs)
)


def chain(text: str) -> str:
    for step in STEPS:
        text = step(text)
    return text


@settings(max_examples=300, deadline=None)
@given(st.one_of(texts, runs))
def test_every_step_and_their_chain_are_idempotent(text: str) -> None:
    for step in (*STEPS, chain):
        once = step(text)
        assert step(once) == once, step
        assert (once is text) == (once == text)


@settings(max_examples=150, deadline=None)
@given(st.one_of(texts, runs))
def test_letters_and_digits_are_never_changed(text: str) -> None:
    def words(text: str) -> list[str]:
        return [char for char in text if char.isalnum()]

    text = text.translate({0x1B: None, 0x9B: None})  # they start terminal sequences, which have letters
    assert words(chain(text)) == words(text)


@settings(max_examples=150, deadline=None)
@given(st.one_of(texts, runs))
def test_later_steps_never_add_or_remove_line_breaks(text: str) -> None:
    plain = control_characters(text)
    assert chain(text).count("\n") == plain.count("\n")
    assert not set("\r\x0b\x0c\x85\u2028\u2029") & set(plain)


@given(st.characters(min_codepoint=0x3000, max_codepoint=0x9FFF))
def test_the_fast_check_for_cjk_detects_every_cjk_character(char: str) -> None:
    assert has_cjk_bytes(char)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "piece",
    [" ", "。", "\u200d", "—", "x~", "中 ", "\U000e0067", "————a", "\r", "　\n", "\x1b]", "\x1bP", "\x1b[1;"],
)
def test_a_long_repetition_is_processed_in_linear_time(step: Callable[[str], str], piece: str) -> None:
    """A step takes a fraction of a second; in quadratic time it would take hours."""
    once = step(piece * (500_000 // len(piece)) + "中")
    assert step(once) is once


@pytest.mark.parametrize("start", ["\x1b]", "\x1bP", "\x1b[", "\x1b(", "\x9b1"])
@pytest.mark.parametrize("piece", ["x", "1;", " ", "(", "中"])
def test_a_long_text_after_an_unfinished_terminal_sequence_is_processed_in_linear_time(start: str, piece: str) -> None:
    once = control_characters(start + piece * (1_000_000 // len(piece)))
    assert control_characters(once) is once
    assert len(once) >= 999_999  # a letter may end the sequence


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("\x1b[33mwarning\x1b[m: done", "warning: done"),
        ("\x1b[1;31;48;5;16m红\x1b[0m色", "红色"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link", "link"),
        ("\x1b(Bplain \x1b[2K\x1b[1A", "plain "),
        ("array[33m] [m", "array[33m] [m"),
        ("\x1b[?1h\x1b=hello\x1b[?1l\x1b>", "hello"),
        (f"\x1b]8;;https://x/{'a' * 4000}\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b7saved\x1b8", "saved"),
        ("a\x1bPq#0;2;0;0;0~-\x1b\\b\x1b_apc\x1b\\c\x1b^pm\x1b\\d\x1bXsos\x1b\\e", "abcde"),
        ("\x1bktitle\x1b\\text", "text"),
        ("\x1b$B\x1b%Gtext\x1b#8 \x1b F", "text "),
        ("\x9b33mwarning\x9b0m", "warning"),
        ("a \x8bword\x9b, next", "a word, next"),
        ("\x1b]0;cut off\nnext line\x07", "0;cut off\nnext line"),
        ("\x1bPcut off\n中文\x1b中文\x1b", "cut off\n中文中文"),
    ],
)
def test_whole_terminal_sequences_are_removed(before: str, after: str) -> None:
    assert control_characters(before) == after
    assert control_characters(after) == after
