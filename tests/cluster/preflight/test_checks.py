"""Tests of the rounds of pairs."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.cluster.preflight.checks import rounds


@given(st.integers(0, 20))
def test_each_pair_occurs_once_and_no_item_twice_in_a_round(number: int) -> None:
    played = rounds(list(range(number)))
    met = [tuple(sorted(pair)) for pairs in played for pair in pairs]
    assert sorted(met) == sorted(combinations(range(number), 2))
    for pairs in played:
        busy = [one for pair in pairs for one in pair]
        assert len(busy) == len(set(busy))
    assert len(played) <= max(number, 1)
