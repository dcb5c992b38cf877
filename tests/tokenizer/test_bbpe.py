import hashlib
import random

import pytest
from tokenizers import Regex, pre_tokenizers

from z2all_ds.tokenizer.bbpe import SPLITS, learn_bbpe


def split(text: str, name: str = "by_script") -> list[str]:
    cut = pre_tokenizers.Split(Regex(SPLITS[name]), behavior="isolated")
    return [piece for piece, _ in cut.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("今天的天气真不错，我们出去走走", ["今天的天气真不错", "，我们出去走走"]),
        ("in 20241231 or 3.14", ["in", " ", "202", "412", "31", " or", " ", "3", ".", "14"]),
        ("def f_x(a):\n        return a", ["def", " f", "_x", "(a", "):\n", "       ", " return", " a"]),
        ("a  \n\n\tb", ["a", "  \n\n", "\tb"]),
        ("<|endoftext|>", ["<|", "endoftext", "|>"]),
        ("x" * 30, ["x" * 24, "x" * 6]),
        ("用Python写", ["用", "Python", "写"]),
        ("東京タワーへ", ["東京タワーへ"]),
    ],
)
def test_text_is_split_into_pieces_before_merging(text: str, pieces: list[str]) -> None:
    assert split(text) == pieces


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("four_characters", ["今天的天", "气", "，it", "'S", " ", "202", "4"]),
        ("llama3", ["今天的天气", "，it", "'S", " ", "202", "4"]),
        ("qwen2", ["今天的天气", "，it", "'S", " ", "2", "0", "2", "4"]),
        ("gpt2", ["今天的天气", "，", "it", "'", "S", " 2024"]),
    ],
)
def test_other_patterns_are_chosen_by_name(name: str, pieces: list[str]) -> None:
    assert split("今天的天气，it'S 2024", name) == pieces


def test_a_chinese_word_has_the_same_tokens_at_any_offset() -> None:
    """A run used to be cut every four characters from its start, so that a word was cut at most offsets."""
    draw = random.Random(0)
    around = ["".join(chr(draw.randrange(0x4E00, 0x9FA5)) for _ in range(5)) for _ in range(60)]
    texts = [f"{some[: number % 6]}天气预报{some[number % 6 :]}" for number, some in enumerate(around)]
    backend = learn_bbpe(iter(texts), 256 + 11)
    word = backend.encode("天气预报").ids
    assert len(word) == 1
    for text in texts:
        assert word[0] in backend.encode(text).ids


def test_the_earlier_pattern_is_unchanged() -> None:
    """Tokenizers trained with it are recognized by their recipe, which does not name it."""
    assert hashlib.sha256(SPLITS["four_characters"].encode()).hexdigest()[:16] == "7e5ebacdef6f03c2"
