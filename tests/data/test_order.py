"""Tests for the document order: reproducible bijections that look shuffled."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.data.order import (
    BLOCK_BYTES,
    BlockRange,
    DomainOrder,
    documents_per_block,
    permuted_index,
)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 700), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40), domain=st.text())
def test_the_permutation_is_a_bijection(count: int, seed: int, epoch: int, domain: str) -> None:
    assert {permuted_index(p, count, seed, epoch, domain) for p in range(count)} == set(range(count))


@given(count=st.integers(1, 2**62), data=st.data())
def test_indices_are_in_range_for_large_counts(count: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, count - 1))
    assert 0 <= permuted_index(position, count, 1, 0, "web") < count


def test_the_order_is_that_of_earlier_versions() -> None:
    """A change of these values changes the data order of existing runs; increase STATE_VERSION with it."""
    assert [permuted_index(p, 10, 0, 0, "web") for p in range(10)] == GOLDEN_SMALL
    assert [permuted_index(p, 10, 0, 1, "web") for p in range(10)] == GOLDEN_NEXT_EPOCH
    assert [permuted_index(p, 10**12, 1234, 7, "维基") for p in range(4)] == GOLDEN_LARGE
    order = DomainOrder("web", 10**9, 256, 5, 1)
    assert order.block_at(10**8) == GOLDEN_BLOCK
    assert order.within(GOLDEN_BLOCK)[:8] == GOLDEN_WITHIN


GOLDEN_SMALL = [4, 8, 6, 7, 1, 5, 0, 9, 2, 3]
GOLDEN_NEXT_EPOCH = [6, 4, 8, 5, 0, 2, 1, 7, 3, 9]
GOLDEN_LARGE = [462417796159, 114311759389, 847203139777, 102792615477]
GOLDEN_BLOCK = BlockRange(25, 895938304, 895938560)
GOLDEN_WITHIN = [53, 56, 233, 194, 237, 199, 241, 43]


@pytest.mark.parametrize("change", [{"seed": 1}, {"epoch": 1}, {"domain": "code"}])
def test_every_part_of_the_key_changes_the_order(change: dict) -> None:
    key: dict[str, Any] = {"seed": 0, "epoch": 0, "domain": "web"}
    before = [permuted_index(p, 1000, **key) for p in range(1000)]
    after = [permuted_index(p, 1000, **(key | change)) for p in range(1000)]
    # Two unrelated permutations agree in one position on average (Poisson); ten or more have a probability of 1e-7.
    assert sum(a == b for a, b in zip(before, after, strict=True)) < 10


def chi_square_of_steps(row: list[int], cells: int) -> float:
    """Return the chi-square statistic of the differences between adjacent values."""
    count = len(row)
    steps = Counter((b - a) % count * cells // count for a, b in zip(row, row[1:] + row[:1], strict=True))
    expected = count / cells
    return sum((steps[c] - expected) ** 2 / expected for c in range(cells))


def test_the_permutation_looks_shuffled() -> None:
    row = [permuted_index(p, 20_000, 11, 0, "web") for p in range(20_000)]
    assert chi_square_of_steps(row, 64) < 115  # p = 0.0001 with 63 degrees of freedom


def test_a_block_is_shuffled_differently_each_epoch() -> None:
    order = DomainOrder("web", 40_000, 20_000, 11, 1)
    first = order.within(BlockRange(0, 0, 20_000))
    assert sorted(first) == list(range(20_000))
    assert chi_square_of_steps(first, 64) < 115
    for other in (BlockRange(1, 0, 20_000), BlockRange(0, 20_000, 40_000)):
        assert sum(a == b for a, b in zip(first, order.within(other), strict=True)) < 10


def test_block_sizes_depend_on_bytes_and_lanes() -> None:
    """Blocks have about a megabyte in a large domain and less in a small one, so that every lane gets several."""
    plenty = documents_per_block(10**9, 4 * 10**12, 256)
    assert plenty == BLOCK_BYTES // 4000
    assert documents_per_block(10_000, 10_000 * 100, 64) == 10_000 // (8 * 64)
    assert documents_per_block(500, 10**6, 256) == 1
    assert documents_per_block(10**9, 10**9 * 2**30, 4) == 1  # each document is larger than a block
    assert documents_per_block(10**9, 0, 4) == 10**9 // 32  # empty texts


def test_any_block_of_a_billion_documents_is_computed_directly() -> None:
    order = DomainOrder("web", 10**9 + 7, 250, 1, 1)
    for number in (0, order.num_blocks - 1, order.num_blocks * 10**6 + 12345):
        block = order.block_at(number)
        assert 0 <= block.first < block.end <= 10**9 + 7
        assert block.epoch == number // order.num_blocks
