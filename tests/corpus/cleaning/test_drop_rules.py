"""Tests of the dropping steps: dropped texts, kept texts, and the exceptions for code."""

import pytest

from z2all_ds.corpus.cleaning.drop_rules import why_garbled, why_symbols, why_too_long, why_too_short

CHINESE = "今天天气很好，我们一起去公园散步，看到了很多盛开的花。孩子们在草地上奔跑，老人们坐在长椅上聊天。"
FRENCH = "« Voilà », dit-elle à l'hôtel du CAFÉ»… où l'été s'achève déjà — naïf, garçon, ÉTÉ, Noël, cœur."
ENGLISH = "It’s the author’s own “voice” that we don’t hear, isn’t it? That’s what she’d said to Zoë’s friend."
CODE = 'def f(a, b):\n    return a <= b and a | b ^ ~a  # "größer" → ünïcode\n' * 3


@pytest.mark.parametrize("text", ["", "plain", CHINESE, FRENCH, ENGLISH, CODE, "ΕΛΛΗΝΙΚΑ Ñandú NÃO ÇA", "🎉 好的 ☕"])
def test_good_text_is_not_garbled(text: str) -> None:
    assert why_garbled(text) == ""


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
@pytest.mark.parametrize("text", [CHINESE, FRENCH, ENGLISH, "Привет, как дела? Все хорошо.", "ok 😀 fine 🎉"])
def test_utf8_decoded_as_latin1_or_cp1252_is_garbled(text: str, encoding: str) -> None:
    # Bytes without a character in Windows-1252 become C1 control characters, as in browsers.
    garbled = "".join(bytes([byte]).decode(encoding, "ignore") or chr(byte) for byte in text.encode())
    assert "decoded wrongly" in why_garbled(garbled)
    assert why_garbled(garbled, is_code=True)


def test_utf8_decoded_as_gbk_and_gbk_decoded_as_utf8_are_garbled() -> None:
    assert why_garbled((CHINESE * 3).encode().decode("gbk", "ignore"))
    assert why_garbled((CHINESE * 3).encode().decode("gbk", "replace"))
    assert why_garbled(CHINESE.encode("gbk").decode("utf-8", "replace"))
    assert why_garbled("锟斤拷锟斤拷锟斤拷 烫烫烫烫烫")


def test_a_few_garbled_characters_in_good_text_are_accepted() -> None:
    assert why_garbled(CHINESE * 10 + "程序员都见过锟斤拷。" + CHINESE * 10) == ""
    assert why_garbled("锛：一种平头斧。" + CHINESE) == ""
    assert why_garbled(CHINESE * 5 + "\ufffd") == ""
    assert why_garbled(CHINESE + "\ufffd\ufffd")


def test_text_with_many_block_characters_is_garbled_except_in_code() -> None:
    blocks = "□□□ □□ □□□□ ok"
    assert "blocks" in why_garbled(blocks)
    assert why_garbled(blocks, is_code=True) == ""
    assert why_garbled(CHINESE + blocks[:8]) == ""


def test_tables_of_box_drawings_are_kept() -> None:
    table = "┌──────┬──────┐\n│ 姓名 │ 年龄 │\n├──────┼──────┤\n│ 张三 │  30  │\n└──────┴──────┘\n"
    assert why_garbled(table) == ""
    assert why_symbols(table, 0.2) == ""


def test_length_limits_ignore_leading_and_trailing_whitespace() -> None:
    assert why_too_short("  四个汉字 \n", 4) == ""
    assert why_too_short("  四个汉字 \n", 5) == "4 characters, fewer than 5"
    assert why_too_long("  四个汉字 \n", 4) == ""
    assert why_too_long("  四个汉字 \n", 3) == "4 characters, more than 3"


def test_text_above_the_symbol_share_is_dropped() -> None:
    assert why_symbols("", 0.0) == ""
    assert why_symbols(CHINESE + ENGLISH + FRENCH, 0.0) == ""
    assert why_symbols("a+b=c", 0.3) == "40% symbols"
    assert why_symbols("a+b=c", 0.4) == ""
    assert why_symbols("😀😀中文", 0.4) == "50% symbols"
    assert why_symbols("①②③ ½ 中文", 0.0) == ""  # numbers are not symbols
    assert why_symbols("★☆★☆→→中", 0.5)


def test_ascii_symbols_do_not_count_in_code() -> None:
    assert why_symbols("a|b^c", 0.1) == "40% symbols"
    assert why_symbols("a|b^c", 0.1, is_code=True) == ""
    assert why_symbols("★★★|x", 0.1, is_code=True) == "60% symbols"
