"""Curves of any length in few points."""

from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.track.downsample import MOST_POINTS, DownsampledCurve


def thinned(values: list[float], most_points: int) -> DownsampledCurve:
    curve = DownsampledCurve(most_points)
    for x, value in enumerate(values):
        curve.add(x, value)
    return curve


@given(st.lists(st.integers(-1000, 1000)), st.sampled_from([2, 4, 10]))
def test_points_are_means_of_equally_many_records(values: list[int], most_points: int) -> None:
    curve = thinned([float(value) for value in values], most_points)
    size = curve.records_per_point
    groups = [values[i : i + size] for i in range(0, len(values), size)]
    points = curve.points()
    assert len(points.x) == len(groups) <= most_points
    assert points.y == pytest.approx([mean(group) for group in groups])
    assert points.x == pytest.approx([mean(range(i, min(i + size, len(values)))) for i in range(0, len(values), size)])
    assert points.low == [min(group) for group in groups]
    assert points.high == [max(group) for group in groups]


def test_a_spike_of_one_step_is_kept() -> None:
    curve = thinned([1.0] * 50_000 + [99.0] + [1.0] * 50_000, MOST_POINTS)
    assert max(curve.points().high) == 99.0
    assert MOST_POINTS / 2 <= len(curve.points().x) <= MOST_POINTS


def test_few_points_are_as_they_were() -> None:
    curve = thinned([3.0, 1.0, 2.0], MOST_POINTS)
    assert curve.records_per_point == 1
    assert curve.points().y == [3.0, 1.0, 2.0]
