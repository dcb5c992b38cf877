"""Tests for packing: the columns of a batch, for a fixed example and random documents, and bins with little padding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpus_maker import assert_same
from z2all_ds.data.packing import COLUMNS, NO_TARGET, Sample, best_fit, make_batch

EOT = 0


def int32(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def test_a_batch_has_the_columns_written_out_here() -> None:
    """The first sample has the rest of a document, a whole one, an empty one and the start of one that continues; the
    second is filled by one document; the third has padding."""
    batch = make_batch(
        [
            Sample(int32(14, EOT, 21, 22, EOT, EOT, 31, 32, 33), [2, 3, 1, 2], 2, True),
            Sample(int32(41, 42, 43, 44, 45, 46, 47, EOT, 99), [8], 0, False),
            Sample(int32(51, 52, EOT, 61, EOT, EOT, EOT, EOT, 99), [3, 2, 3], 1, False, 3),
        ]
    )
    none = NO_TARGET
    expected = {
        "input_ids": [
            [14, EOT, 21, 22, EOT, EOT, 31, 32], [41, 42, 43, 44, 45, 46, 47, EOT],
            [51, 52, EOT, 61, EOT, EOT, EOT, EOT],
        ],
        "next_tokens": [
            [EOT, none, 22, EOT, none, none, 32, 33], [42, 43, 44, 45, 46, 47, EOT, none],
            [52, EOT, none, EOT, none, none, none, none],
        ],
        "position_ids": [[0, 1, 0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 0, 1, 2]],
        "document_ids": [[0, 0, 1, 1, 1, 2, 3, 3], [0] * 8, [0, 0, 0, 1, 1, 2, 2, 2]],
        "domain_ids": [[2] * 8, [0] * 8, [1] * 8],
    }  # fmt: skip
    assert tuple(batch) == COLUMNS
    assert_same(batch, {name: np.array(column) for name, column in expected.items()})
    assert all(column.dtype == torch.int64 for column in batch.values())


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=30), continues=st.booleans(), data=st.data())
def test_columns_agree_with_each_other(lengths: list[int], continues: bool, data: st.DataObject) -> None:
    total = sum(lengths)
    samples = []
    for row in range(data.draw(st.integers(1, 4))):
        order = data.draw(st.permutations(lengths))
        samples.append(Sample(np.arange(1000 * row, 1000 * row + total + 1, dtype=np.int32), order, row, continues))
    batch = {name: column.numpy() for name, column in make_batch(samples).items()}
    for row, sample in enumerate(samples):
        starts = np.cumsum([0, *sample.piece_lengths[:-1]])
        np.testing.assert_array_equal(np.flatnonzero(batch["position_ids"][row] == 0), starts)
        np.testing.assert_array_equal(np.flatnonzero(np.diff(batch["document_ids"][row], prepend=-1)), starts)
        assert batch["document_ids"][row].max() == len(lengths) - 1
        ends = np.cumsum(sample.piece_lengths) - 1
        without = ends[:-1] if continues else ends
        np.testing.assert_array_equal(np.flatnonzero(batch["next_tokens"][row] == NO_TARGET), without)
        targets = batch["next_tokens"][row] != NO_TARGET
        np.testing.assert_array_equal(batch["next_tokens"][row][targets], batch["input_ids"][row][targets] + 1)


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), max_size=120))
def test_bins_hold_every_piece_once_and_do_not_overflow(lengths: list[int]) -> None:
    bins = best_fit(lengths, 64)
    assert sorted(piece for content in bins for piece in content) == list(range(len(lengths)))
    filled = [sum(lengths[piece] for piece in content) for content in bins]
    assert all(amount <= 64 for amount in filled)
    # Best-fit guarantees that no two bins fit into one.
    emptiest = sorted(filled)[:2]
    assert len(emptiest) < 2 or sum(emptiest) > 64
    assert bins == sorted(sorted(content) for content in bins)


def test_bins_of_a_small_example() -> None:
    assert best_fit([5, 7, 3, 2, 4, 1], 8) == [[0, 2], [1, 5], [3, 4]]


@pytest.mark.parametrize("mean", [8, 40, 200])
def test_bins_waste_little(mean: int) -> None:
    """More than 96 % of the space is used when about 32 samples of documents are packed together."""
    draw = np.random.default_rng(mean)
    lengths: list[int] = []
    while sum(lengths) < 32 * 512:
        lengths.append(int(min(draw.exponential(mean) + 1, 512)))
    bins = best_fit(lengths, 512)
    assert sum(lengths) / (512 * len(bins)) > 0.96
