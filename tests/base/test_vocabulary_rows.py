"""Mapping of the vocabulary rows of another model to the rows of this one."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.base.errors import ConfigError
from z2all_ds.base.vocabulary_rows import NEW, automatic_size, match_rows

ABC = {"a": 0, "b": 1, "c": 2}


def test_a_larger_vocabulary_keeps_ids_and_marks_the_other_rows_as_new() -> None:
    found = match_rows({**ABC, "d": 3}, 6, ABC, 3)
    assert (found.rows, found.by) == ([0, 1, 2, NEW, NEW, NEW], "id")
    assert found.words() == "vocabulary by id: 3 of 6 rows, 3 new"


def test_a_token_on_a_former_padding_row_is_new_and_other_padding_is_kept() -> None:
    assert match_rows({**ABC, "d": 3}, 5, ABC, 5).rows == [0, 1, 2, NEW, 4]


def test_a_smaller_vocabulary_with_the_same_ids_is_matched_by_id() -> None:
    found = match_rows({"a": 0, "b": 1}, 2, ABC, 64)
    assert (found.rows, found.by, found.num_new) == ([0, 1], "id", 0)


def test_rows_are_matched_by_token_text_if_an_id_differs() -> None:
    found = match_rows({"b": 0, "a": 1, "x": 2}, 4, ABC, 3)
    assert (found.rows, found.by) == ([1, 0, NEW, NEW], "text")
    assert found.words().startswith("vocabulary by token text")


def test_a_token_without_a_row_in_the_other_model_is_new() -> None:
    assert match_rows({"c": 0, "a": 1}, 2, ABC, 2).rows == [NEW, 0]


def test_rows_are_matched_unchecked_by_id_without_the_other_tokenizer() -> None:
    found = match_rows(ABC, 5, None, 4)
    assert (found.rows, found.by) == ([0, 1, 2, 3, NEW], "unknown")
    assert "unchecked" in found.words()
    with pytest.raises(ConfigError, match=r"model.vocab_size=3: .*4 rows, and no tokenizer.json"):
        match_rows(ABC, 3, None, 4)


def test_vocabularies_without_a_common_token_are_refused() -> None:
    with pytest.raises(ConfigError, match="no token in common"):
        match_rows({"x": 0, "y": 1}, 2, ABC, 3)


vocabularies = st.lists(st.text("abcdef", min_size=1, max_size=2), unique=True, min_size=1).map(
    lambda texts: {text: number for number, text in enumerate(texts)}
)


@given(vocabularies, vocabularies, st.integers(0, 5), st.integers(0, 5))
def test_a_row_is_never_used_for_a_different_token(
    here: dict[str, int], there: dict[str, int], more_here: int, more_there: int
) -> None:
    try:
        found = match_rows(here, len(here) + more_here, there, len(there) + more_there)
    except ConfigError:
        assert not here.keys() & there.keys()
        return
    assert len(found.rows) == len(here) + more_here
    for text, number in here.items():
        assert found.rows[number] == there.get(text, NEW)


def test_a_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"its ids cannot be counted .*not a regular file"):
        automatic_size(str(tmp_path), "")
