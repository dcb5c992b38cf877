import pytest
from tokenizers import Regex, pre_tokenizers

from z2all_ds.tokenizer.bbpe import PRE_SPLIT


def split(text: str) -> list[str]:
    cut = pre_tokenizers.Split(Regex(PRE_SPLIT), behavior="isolated")
    return [piece for piece, _ in cut.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("今天的天气真不错，我们出去走走", ["今天的天", "气真不错", "，", "我们出去", "走走"]),
        ("in 20241231 or 3.14", ["in", " ", "202", "412", "31", " or", " ", "3", ".", "14"]),
        ("def f_x(a):\n        return a", ["def", " f", "_x", "(a", "):\n", "       ", " return", " a"]),
        ("a  \n\n\tb", ["a", "  \n\n", "\tb"]),
        ("<|endoftext|>", ["<|", "endoftext", "|>"]),
        ("x" * 30, ["x" * 24, "x" * 6]),
        ("用Python写", ["用", "Python", "写"]),
        ("東京タワーへ", ["東京タワ", "ー", "へ"]),
    ],
)
def test_text_is_split_into_pieces_before_merging(text: str, pieces: list[str]) -> None:
    assert split(text) == pieces
