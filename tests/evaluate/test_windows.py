"""Tests for windows: every token counts once, with enough context."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.base.errors import ConfigError
from z2all_ds.evaluate.loading import LoadedModel
from z2all_ds.evaluate.windows import WindowSettings, document_windows, packed_windows, read_document, window_settings

BOS, EOS = 1001, 1002


@given(st.integers(0, 60), st.integers(2, 20), st.data())
def test_each_token_of_a_document_counts_once_with_enough_context(length: int, window: int, data: Any) -> None:
    stride, with_bos = data.draw(st.integers(1, window - 1)), data.draw(st.booleans())
    cut = WindowSettings(window, stride, False, BOS if with_bos else None, None)
    counted = []
    for one in document_windows(list(range(length)), cut):
        assert len(one.ids) <= window and not one.counted[0] and any(one.counted)
        for place, (token, counts) in enumerate(zip(one.ids, one.counted, strict=True)):
            if counts:
                counted.append(token)
                assert place >= min(window - stride, token + with_bos)
    assert counted == list(range(0 if with_bos else 1, length))


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(2, 12), st.booleans())
def test_packed_windows_cut_one_sequence_as_in_training(lengths: list[int], window: int, with_bos: bool) -> None:
    cut = WindowSettings(window, window - 1, True, BOS if with_bos else None, EOS)
    documents = [[10 * number + token for token in range(length)] for number, length in enumerate(lengths)]
    head = [BOS] if with_bos else []
    row = [token for ids in documents for token in [*head, *ids, EOS]]
    windows = list(packed_windows(iter(documents), cut))
    assert [one.ids for one in windows] == [row[k : k + window + 1] for k in range(0, len(row) - 1, window)]
    counted = [t for one in windows for t, counts in zip(one.ids, one.counted, strict=True) if counts]
    assert counted == [token for token in row[1:] if token != BOS]


def test_bytes_and_characters_cover_only_the_predicted_text(loaded: LoadedModel) -> None:
    text = "def 今天天气"
    whole = read_document(loaded.tokenizer, text, first_counts=True)
    assert (whole.bytes, whole.characters) == (16, 8)
    rest = read_document(loaded.tokenizer, text, first_counts=False)
    first = loaded.tokenizer.decode(whole.ids[:1])
    assert text.startswith(first)
    assert (rest.bytes, rest.characters) == (16 - len(first.encode()), 8 - len(first))
    nothing = read_document(loaded.tokenizer, "", first_counts=False)
    assert (nothing.ids, nothing.bytes, nothing.characters) == ([], 0, 0)
    assert loaded.tokenizer.eos_token_id not in read_document(loaded.tokenizer, "<|endoftext|>", True).ids


@pytest.mark.parametrize("text", ["中国", "魑魅 abc", "𝄞 music", "\ufffd中", " hello", "a"])
def test_a_first_token_may_end_inside_a_character(loaded: LoadedModel, text: str) -> None:
    """Only the bytes of the first token are left out; in this tokenizer, a character of a token is one byte."""
    found = read_document(loaded.tokenizer, text, first_counts=False)
    (first,) = loaded.tokenizer.convert_ids_to_tokens(found.ids[:1])
    assert found.bytes == len(text.encode()) - len(first)


def test_the_begin_of_text_token_follows_the_tokenizer_by_default(loaded: LoadedModel) -> None:
    class Adding:
        """The same tokenizer, configured to add a begin-of-text token before every text."""

        bos_token_id, eos_token_id = loaded.tokenizer.bos_token_id, None

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [self.bos_token_id, *loaded.tokenizer(text)["input_ids"]]}

    def bos_of(tokenizer: Any, bos: str) -> int | None:
        return window_settings(tokenizer, 48, None, None, False, bos).bos_id

    bos_id = loaded.tokenizer.bos_token_id
    assert [bos_of(loaded.tokenizer, bos) for bos in ("auto", "yes", "no")] == [None, bos_id, None]
    assert [bos_of(Adding(), bos) for bos in ("auto", "yes", "no")] == [bos_id, bos_id, None]


@pytest.mark.parametrize(
    ("window", "stride", "packed", "bos", "words"),
    [
        (49, None, False, "auto", r"^window=49: must be from 2 to the model's maximum, 48\. "),
        (1, None, False, "auto", r"^window=1: must be"),
        (None, 48, False, "auto", r"^stride=48: must be from 1 to window - 1 = 47, or tokens"),
        (8, 0, False, "auto", r"^stride=0: must be from 1 to window - 1 = 7,"),
        (8, 4, True, "auto", r"^stride=4: packed windows do not overlap\. "),
        (None, None, False, "maybe", r"^bos=maybe: no such choice\. Known: auto, yes, no\.$"),
    ],
)
def test_invalid_settings_are_refused(
    loaded: LoadedModel, window: int | None, stride: int | None, packed: bool, bos: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        window_settings(loaded.tokenizer, 48, window, stride, packed, bos)


def test_a_model_without_a_maximum_length_needs_a_window(loaded: LoadedModel) -> None:
    assert window_settings(loaded.tokenizer, None, 16, None, False, "auto").window == 16
    with pytest.raises(ConfigError, match=r"^window: the model's config\.json does not state .*\. Set --window\.$"):
        window_settings(loaded.tokenizer, None, None, None, False, "auto")
    with pytest.raises(ConfigError, match=r"^window=1: must be at least 2"):
        window_settings(loaded.tokenizer, None, 1, None, False, "auto")
