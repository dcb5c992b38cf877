"""The permutation is a bijection, the same everywhere, and looks shuffled."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.data.order import document_at, lane_position, permuted_index


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 700), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40), domain=st.text())
def test_bijective(count: int, seed: int, epoch: int, domain: str) -> None:
    assert {permuted_index(p, count, seed, epoch, domain) for p in range(count)} == set(range(count))


@given(count=st.integers(1, 2**62), data=st.data())
def test_in_range_for_large_counts(count: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, count - 1))
    assert 0 <= permuted_index(position, count, 1, 0, "web") < count


def test_golden_values() -> None:
    """A change here changes the data order of every run there is: raise the version of the state with it."""
    assert [permuted_index(p, 10, 0, 0, "web") for p in range(10)] == GOLDEN_SMALL
    assert [permuted_index(p, 10, 0, 1, "web") for p in range(10)] == GOLDEN_NEXT_EPOCH
    assert [permuted_index(p, 10**12, 1234, 7, "维基") for p in range(4)] == GOLDEN_LARGE


GOLDEN_SMALL = [9, 3, 7, 1, 2, 0, 8, 4, 6, 5]
GOLDEN_NEXT_EPOCH = [7, 6, 4, 1, 0, 8, 5, 2, 9, 3]
GOLDEN_LARGE = [62066670580, 860953726362, 742836083801, 260903005190]


@pytest.mark.parametrize("change", [{"seed": 1}, {"epoch": 1}, {"domain": "code"}])
def test_every_part_of_the_key_counts(change: dict) -> None:
    key = {"seed": 0, "epoch": 0, "domain": "web"}
    before = [permuted_index(p, 1000, **key) for p in range(1000)]
    after = [permuted_index(p, 1000, **(key | change)) for p in range(1000)]
    # Two unrelated permutations agree in one place on average (Poisson): ten would be one in ten million.
    assert sum(a == b for a, b in zip(before, after, strict=True)) < 10


def test_looks_shuffled() -> None:
    """Steps between neighbours spread over the whole range: a chi-square over 64 cells of 20,000 differences."""
    count, cells = 20_000, 64
    row = [permuted_index(p, count, 11, 0, "web") for p in range(count)]
    steps = Counter((b - a) % count * cells // count for a, b in zip(row, row[1:] + row[:1], strict=True))
    expected = count / cells
    assert sum((steps[c] - expected) ** 2 / expected for c in range(cells)) < 115  # p = 0.0001 at 63 degrees


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 60), num_lanes=st.integers(1, 40), epochs=st.integers(1, 3))
def test_lanes_read_every_document_once_an_epoch(count: int, num_lanes: int, epochs: int) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    for lane in range(num_lanes):
        drawn = 0
        while (position := lane_position(lane, num_lanes, drawn)) < count * epochs:
            place = document_at(position, count, 9, "web")
            seen[place.epoch, place.document_index] += 1
            drawn += 1
    assert seen == Counter({(epoch, document): 1 for epoch in range(epochs) for document in range(count)})
