"""Tests for the document order: reproducible bijections that look shuffled, and lanes that read each document once."""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.data.order import (
    BLOCK_BYTES,
    BlockRange,
    DomainOrder,
    EvenOrder,
    TokenOrder,
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


@settings(max_examples=80, deadline=None)
@given(
    num_documents=st.integers(1, 200),
    documents_per_block=st.integers(1, 30),
    num_lanes=st.integers(1, 20),
    epochs=st.integers(1, 3),
    draw=st.randoms(use_true_random=False),
    even=st.booleans(),
)
def test_lanes_read_every_document_once_per_epoch(
    num_documents: int, documents_per_block: int, num_lanes: int, epochs: int, draw: Any, even: bool
) -> None:
    """Also if documents have no size, or one is larger than the part of a lane."""
    sizes = np.array([draw.choice((0, 1, 10, 1000)) for _ in range(num_documents)])
    values = ("web", num_documents, documents_per_block, 9, num_lanes)
    order = EvenOrder(*values, lambda: sizes) if even else DomainOrder(*values)
    seen: Counter[tuple[int, int]] = Counter()
    for lane in range(num_lanes):
        now = order.lane_block(lane, 0, 0)
        while now.range.epoch < epochs:
            seen.update((now.range.epoch, now.range.first + inside) for inside in now.documents[now.position :])
            assert order.lane_block(lane, now.block, now.position) == now
            now = order.lane_block(lane, now.block + 1, 0)
    assert seen == Counter({(epoch, document): 1 for epoch in range(epochs) for document in range(num_documents)})


def read_after(order: DomainOrder, sizes: npt.NDArray[np.int64], epochs: int) -> npt.NDArray[np.int64]:
    """Return how much of each document is read when every lane has read its share of `epochs` times the domain."""
    read = np.zeros_like(sizes)
    for lane in range(order.num_lanes):
        left, block = int(sizes.sum()) * epochs // order.num_lanes, 0
        while left > 0:
            now = order.lane_block(lane, block, 0)
            documents = np.array(now.documents[now.position :]) + now.range.first
            before = np.cumsum(sizes[documents]) - sizes[documents]
            read[documents] += np.clip(left - before, 0, sizes[documents])
            left, block = left - int(sizes[documents].sum()), now.block + 1
    return read


LENGTHS = {
    "20 MB": (np.random.default_rng(0).lognormal(7, 1.3, 8000), 0.01),
    "1 GB": (np.random.default_rng(0).lognormal(7.5, 1.2, 300_000), 0.001),
    "equal": (np.full(8000, 2500.0), 0.01),
}


@pytest.mark.parametrize("name", list(LENGTHS))
@pytest.mark.parametrize("epochs", [1, 4])
def test_after_some_epochs_every_document_was_read_as_often(name: str, epochs: int) -> None:
    """Only documents at the seam of a lane are read once more or less, with 64 lanes and very different lengths."""
    sizes, limit = LENGTHS[name][0].astype(np.int64) + 1, LENGTHS[name][1]
    per_block = documents_per_block(len(sizes), int(sizes.sum()), 64)
    read = read_after(EvenOrder("web", len(sizes), per_block, 3, 64, lambda: sizes), sizes, epochs)
    assert np.maximum(epochs * sizes - read, 0).sum() / sizes.sum() < limit
    assert (read >= (epochs - 1) * sizes).all()
    assert (read <= (epochs + 1) * sizes).all()
    assert (read != epochs * sizes).sum() < 64 * 8


def test_lanes_do_not_drift_apart_over_many_epochs() -> None:
    """Parts of an epoch differ by up to a document, and by no more over all epochs together."""
    sizes = np.random.default_rng(1).lognormal(5, 1.5, 300).astype(np.int64) + 1
    order = EvenOrder("web", 300, 1, 3, 16, lambda: sizes)
    largest = sizes.max()
    given = np.zeros(16, dtype=np.int64)
    for epoch in range(40):
        cuts = [row for row, _, _ in order.cuts(epoch)]
        row = np.array([order.block_at(epoch * 300 + number).first for number in range(300)])
        given += [int(sizes[row[begin:end]].sum()) for begin, end in pairwise(cuts)]
        assert np.abs(given - sizes.sum() * (epoch + 1) / 16).max() <= 2 * largest


@given(
    sizes=st.lists(st.integers(1, 50) | st.integers(1, 3000), min_size=1, max_size=60),
    documents_per_block=st.integers(1, 9),
    num_lanes=st.integers(1, 20),
    unit=st.sampled_from([1, 1, 2, 7, 50]),
)
def test_split_parts_have_equally_many_tokens_and_every_token_once(
    sizes: list[int], documents_per_block: int, num_lanes: int, unit: int
) -> None:
    """For any lengths: of one document, too, and of documents that are larger than several parts."""
    values = ("web", len(sizes), documents_per_block, 9, num_lanes)
    order = TokenOrder(*values, lambda: np.array(sizes), unit)
    epochs = 3
    read, totals = Counter[tuple[int, int, int]](), []
    for lane in range(num_lanes):
        total, now = 0, order.lane_block(lane, 0, 0)
        while now.range.epoch < epochs:
            assert order.lane_block(lane, now.block, now.position) == now
            for position in range(now.position, len(now.documents)):
                document = now.range.first + now.documents[position]
                begin = now.begin if position == now.position else 0
                end = now.end if now.end and position == len(now.documents) - 1 else sizes[document]
                assert begin < end
                assert begin % unit == 0
                assert end % unit == 0 or end == sizes[document]
                read.update((now.range.epoch, document, token) for token in range(begin, end))
                total += end - begin
            now = order.lane_block(lane, now.block + 1, 0)
        totals.append(total)
    everything = (
        (epoch, document, token) for epoch in range(epochs) for document, n in enumerate(sizes) for token in range(n)
    )
    assert read == Counter(everything)
    assert max(totals) - min(totals) <= (1 if unit == 1 else 2 * unit)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 10**7), st.integers(1, 2000)), min_size=1, max_size=40),
    num_lanes=st.integers(1, 20),
    unit=st.sampled_from([1, 7, 5000]),
)
def test_places_in_bytes_give_every_token_to_one_lane(
    lengths: list[tuple[int, int]], num_lanes: int, unit: int
) -> None:
    """For any bytes per token. Only documents that have no more tokens than a unit may be read by two lanes."""
    sizes, counts = np.array([size for size, _ in lengths]), [count for _, count in lengths]
    order, read = EvenOrder("web", len(sizes), 2, 9, num_lanes, lambda: sizes, unit), Counter[tuple[int, int, int]]()
    for lane in range(num_lanes):
        now = order.lane_block(lane, 0, 0)
        while now.range.epoch < 2:
            for position in range(now.position, len(now.documents)):
                document = now.range.first + now.documents[position]
                begin = now.begin if position == now.position else 0
                end = now.end if position == len(now.documents) - 1 else 0
                first, last = order.part(document, begin, end, counts[document])
                assert first % unit == 0
                read.update((now.range.epoch, document, token) for token in range(first, last))
            now = order.lane_block(lane, now.block + 1, 0)
    for epoch in range(2):
        for document, count in enumerate(counts):
            times = {read[epoch, document, token] for token in range(count)}
            assert times == {1} or (count <= unit and min(times) >= 1)


def test_lanes_that_count_bytes_share_large_documents() -> None:
    """One of them has a quarter of the text, 16 times the part of a lane."""
    sizes = np.concatenate([[50_000_000], np.full(1500, 100_000)])
    order, tokens = EvenOrder("web", len(sizes), 1, 3, 64, lambda: sizes, 1), sizes // 4
    totals = np.zeros(64, dtype=np.int64)
    for lane in range(64):
        now = order.lane_block(lane, 0, 0)
        while now.range.epoch == 0:
            document = now.range.first
            first, last = order.part(document, now.begin, now.end, int(tokens[document]))
            totals[lane] += last - first
            now = order.lane_block(lane, now.block + 1, 0)
    assert totals.sum() == tokens.sum()
    assert totals.max() - totals.min() <= 2


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
