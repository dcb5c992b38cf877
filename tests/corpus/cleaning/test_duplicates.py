"""Tests of exact duplicates: the first document is kept, whatever the parts and buckets."""

from collections.abc import Sequence
from pathlib import Path

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.corpus.cleaning import duplicates
from z2all_ds.corpus.cleaning.duplicates import content_key, find_exact_duplicates


def keys_of(texts: Sequence[str]) -> np.ndarray:
    return np.frombuffer(b"".join(content_key(text) for text in texts), dtype="V16")


def test_the_key_ignores_leading_and_trailing_whitespace_of_the_content() -> None:
    assert content_key(" 一段话\n") == content_key("一段话") != content_key("一段 话")
    assert len(content_key("")) == 16
    content_key("\ud800")  # a lone surrogate is accepted


def test_the_first_of_several_equal_documents_is_kept() -> None:
    parts = [keys_of(["a", "b", "a"]), keys_of([]), keys_of(["b ", "c"]), keys_of(["a"])]
    found = find_exact_duplicates(parts)
    assert [mask.tolist() for mask in found.keep] == [[True, True, False], [], [False, True], [False]]
    assert found.pairs == [(2, 0), (3, 1), (5, 0)]


def test_empty_input_gives_empty_masks() -> None:
    assert find_exact_duplicates([]).keep == []
    assert [len(mask) for mask in find_exact_duplicates([keys_of([])]).keep] == [0]


def test_keys_that_share_half_their_bits_are_different() -> None:
    rows = np.array([[5, 1], [5, 2], [5, 1], [6, 1]], dtype=np.uint64)
    assert find_exact_duplicates([rows]).keep[0].tolist() == [True, True, False, True]


def test_keys_can_be_memory_mapped_files(tmp_path: Path) -> None:
    keys_of(["a", "b", "a"]).tofile(tmp_path / "keys")
    mapped = np.memmap(tmp_path / "keys", "V16", "r")
    assert find_exact_duplicates([mapped]).keep[0].tolist() == [True, True, False]


words = st.sampled_from([0, 1, 1 << 62, 3 << 62, (1 << 64) - 1])
parts_of_keys = st.lists(npst.arrays(np.uint64, st.tuples(st.integers(0, 8), st.just(2)), elements=words), max_size=4)


@settings(max_examples=100, deadline=None)
@given(parts_of_keys, st.integers(1, 6))
def test_the_result_equals_a_simple_search_for_any_number_of_buckets(
    parts: list[np.ndarray], rows_per_bucket: int
) -> None:
    first_seen: dict[tuple[int, int], int] = {}
    keep, pairs = [], []
    for number, row in enumerate(row for part in parts for row in part):
        original = first_seen.setdefault(tuple(row.tolist()), number)
        keep.append(original == number)
        pairs += [(number, original)] * (original != number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "ROWS_PER_BUCKET", rows_per_bucket)
        found = find_exact_duplicates(parts)
    assert np.concatenate([*found.keep, np.zeros(0, bool)]).tolist() == keep
    assert found.pairs == pairs[:5]
