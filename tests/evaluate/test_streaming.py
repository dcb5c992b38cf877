"""Tests for streamed text: it equals the whole text and never contains part of a character or of a stop string."""

from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.evaluate.generate import TextStream, cut_at_stop, stable_part
from z2all_ds.tokenizer.tokenization_z2all import load_tokenizer

opened = cache(load_tokenizer)


@pytest.mark.parametrize(
    ("text", "stops", "wanted"),
    [
        ("abc", (), ("abc", False)),
        ("abcabc", ("c",), ("ab", True)),
        ("abc", ("x", "bc", "abc"), ("", True)),
        ("今天。明天", ("。",), ("今天", True)),
    ],
)
def test_text_is_cut_at_the_first_stop_string(text: str, stops: tuple[str, ...], wanted: tuple[str, bool]) -> None:
    assert cut_at_stop(text, stops) == wanted


@pytest.mark.parametrize(
    ("text", "stops", "wanted"),
    [("今\ufffd", (), "今"), ("a\ufffdb", (), "a\ufffdb"), ("one\n", ("\n\n",), "one"), ("xEN", ("END", "N!"), "x")],
)
def test_the_stable_part_excludes_partial_characters_and_partial_stop_strings(
    text: str, stops: tuple[str, ...], wanted: str
) -> None:
    assert stable_part(text, stops) == wanted


@settings(max_examples=30)
@given(st.text(st.characters(codec="utf-8"), max_size=30), st.sampled_from([(), ("。",), ("ab", "\n")]))
def test_streamed_pieces_add_up_to_the_whole_text(small_tokenizer: Path, text: str, stops: tuple[str, ...]) -> None:
    tokenizer = opened(small_tokenizer)
    ids = tokenizer.encode("今天" + text)
    pieces: list[str] = []
    stream = TextStream(tokenizer.decode, stops, pieces.append)
    stream.put(torch.tensor([ids[:1]]))
    for token in ids:
        stream.put(torch.tensor([token]))
        assert "\ufffd" not in "".join(pieces) or "\ufffd" in text
    stream.end()
    assert "".join(pieces) == cut_at_stop("今天" + text, stops)[0]
