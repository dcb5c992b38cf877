"""Buckets of metrics, compared with the plain records."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.track.tables import (
    COUNT,
    MAX,
    MIN,
    SUM,
    Buckets,
    columns_of,
    mean_of,
    merge_buckets,
)
from z2all_ds.track.writer import parse_line

# Integers, so that sums are the same in any order.
VALUES = st.one_of(st.none(), st.booleans(), st.integers(-1000, 1000), st.just(float("nan")), st.just(float("inf")))
RECORDS = st.lists(st.dictionaries(st.sampled_from(["loss", "损失", "lr"]), VALUES), max_size=60)


def plain(records: list[dict[str, Any]], name: str) -> list[float]:
    values = [record.get(name) for record in records]
    return [float(value) for value in values if value is not None and math.isfinite(value)]


@settings(max_examples=200, deadline=None)
@given(RECORDS, st.lists(st.integers(1, 20), min_size=1), st.sampled_from([2, 4, 8]))
def test_buckets_have_the_counts_sums_and_extremes_of_their_records(
    records: list[dict[str, Any]], pieces: list[int], most: int
) -> None:
    buckets, begin = Buckets(most), 0
    while begin < len(records):
        piece = records[begin : begin + pieces[begin % len(pieces)]]
        buckets.add(columns_of(piece), len(piece))
        begin += len(piece)
    assert buckets.records == len(records)
    assert buckets.used <= most
    assert buckets.weights().sum() == len(records)
    for name in ("loss", "损失", "lr", "never seen"):
        table = buckets.table(name)
        assert buckets.total(name) == sum(plain(records, name))
        for number in range(buckets.used):
            own = plain(records[number * buckets.width : (number + 1) * buckets.width], name)
            assert table[COUNT, number] == len(own)
            assert table[SUM, number] == sum(own)
            assert table[MIN, number] == min(own, default=math.inf)
            assert table[MAX, number] == max(own, default=-math.inf)


def test_a_field_that_appears_late_is_nan_before() -> None:
    buckets = Buckets(4)
    buckets.add(columns_of([{"loss": 1.0}] * 5), 5)
    buckets.add(columns_of([{"loss": 1.0, "late": 7.0}]), 1)
    assert buckets.width == 2
    assert mean_of(buckets.table("late"))[-1] == 7.0
    assert np.isnan(mean_of(buckets.table("late"))[:-1]).all()


def test_weights_of_merged_records_are_added() -> None:
    buckets = Buckets(4)
    for number in range(5):
        buckets.add(columns_of([{"loss": 1.0}]), 1, np.array([10.0 + number]))
    assert buckets.weights().tolist() == [10 + 11, 12 + 13, 14]


def test_values_that_are_not_numbers_are_left_out() -> None:
    records = [{"a": 1, "text": "x", "list": [1, 2]}, {"a": 2, "text": "y", "list": [1, 2], "huge": 10**400}]
    columns = columns_of(records)
    assert list(columns) == ["a"]
    assert columns["a"].tolist() == [1.0, 2.0]
    assert columns_of([{"only": [1, 2]}, {"only": [3, 4]}, {}]) == {}


def test_neighbouring_buckets_of_a_table_are_merged() -> None:
    buckets = Buckets(8)
    buckets.add(columns_of([{"a": value} for value in (1, 5, None, 2, 9)]), 5)
    table = merge_buckets(buckets.table("a"), np.array([0, 2, 4]))
    assert table[SUM].tolist() == [6, 2, 9]
    assert table[COUNT].tolist() == [2, 1, 1]


@pytest.mark.parametrize(
    ("line", "record"),
    [
        (b'{"a": 1}', {"a": 1}),
        (b'{"a": NaN, "b": 2}', {"a": pytest.approx(float("nan"), nan_ok=True), "b": 2}),
        (b'{"a": 1', None),
        (b"[1]", None),
        (b'{"a": "\xff"}', None),
        (b"", None),
    ],
)
def test_a_line_is_parsed_as_a_record_or_none(line: bytes, record: dict[str, Any] | None) -> None:
    assert parse_line(line) == record
