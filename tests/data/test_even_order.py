"""Tests for lanes that read equal parts of an epoch: each document once, for any lengths."""

from collections import Counter
from itertools import pairwise
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.data.even_order import EvenOrder, TokenOrder
from z2all_ds.data.order import DomainOrder, Used, documents_per_block


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


def test_progress_is_exact_and_orders_the_documents_of_a_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For two lanes in turn: after each step, a run asks for the progress of all lanes."""
    sizes = np.random.default_rng(2).integers(1, 99, 400)
    order = TokenOrder("web", 400, 25, 3, 2, lambda: sizes)
    blocks = [order.block_at(number) for number in range(16)]
    read = np.concatenate([[0], np.cumsum([sizes[one.first + np.array(order.within(one))] for one in blocks])]).tolist()
    order.prepare()
    total, part = read[-1], order._given[1][1]
    within = create_autospec(DomainOrder.within, side_effect=DomainOrder.within)
    monkeypatch.setattr(DomainOrder, "within", within)
    for position in range(7 * 25):
        for lane, first in ((0, 0), (1, 9)):
            (block, inside), before = divmod(position + first * 25, 25), read[position + first * 25]
            assert order.left_in_part(lane, block, inside) == (part, total)[lane] - before
            assert order.epochs_read(lane, block, inside, Used(0, 0)) == (before - lane * part) * 2 / total
    ordered = [call.args[1] for call in within.call_args_list]
    assert ordered == [blocks[number] for row in range(7) for number in (row, row + 9)]


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
