"""Learning rates as properties of the whole curve."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.config import ScheduleSection
from z2all_ds.train.schedules import learning_rate

KINDS = ("cosine", "linear", "constant")
peaks = st.floats(1e-7, 10.0)


@st.composite
def curves(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS) -> tuple[list[float], float, ScheduleSection]:
    """Every rate of a run, its peak and its schedule; at least two steps come after the warm-up."""
    warmup = draw(st.integers(0, 40))
    total = warmup + draw(st.integers(2, 60))
    schedule = ScheduleSection(kind=draw(st.sampled_from(kinds)), warmup_steps=warmup, min_ratio=draw(st.floats(0, 1)))
    peak = draw(peaks)
    return [learning_rate(step, total, peak, schedule) for step in range(total)], peak, schedule


@given(curve=curves())
def test_never_above_the_peak_nor_below_the_lowest(curve: tuple[list[float], float, ScheduleSection]) -> None:
    rates, peak, schedule = curve
    assert max(rates) <= peak
    assert min(rates) > 0 or schedule.min_ratio * peak == 0
    assert min(rates[schedule.warmup_steps :]) >= peak * schedule.min_ratio


@given(curve=curves())
def test_warm_up_ends_on_the_peak_exactly(curve: tuple[list[float], float, ScheduleSection]) -> None:
    rates, peak, schedule = curve
    warmup = schedule.warmup_steps
    if warmup:
        assert rates[warmup - 1] == peak
        assert rates[0] == pytest.approx(peak / warmup, rel=1e-15)
        assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup] == peak


@given(curve=curves(("cosine", "linear")))
def test_last_step_is_the_lowest_exactly(curve: tuple[list[float], float, ScheduleSection]) -> None:
    rates, peak, schedule = curve
    assert rates[-1] == peak * schedule.min_ratio
    # Falls all the way; a rounding step up where it is nearly flat is allowed.
    after = rates[schedule.warmup_steps :]
    for earlier, later in itertools.pairwise(after):
        assert later <= earlier * (1 + 1e-15)


@given(curve=curves())
def test_no_jump_anywhere(curve: tuple[list[float], float, ScheduleSection]) -> None:
    rates, peak, schedule = curve
    steps_after = len(rates) - 1 - schedule.warmup_steps
    for step, (earlier, later) in enumerate(itertools.pairwise(rates), start=1):
        # The steepest slopes: the warm-up's, the line's, and the middle of the cosine (pi/2 times the line's).
        steepest = peak / schedule.warmup_steps if step < schedule.warmup_steps else 1.571 * peak / steps_after
        assert abs(later - earlier) <= steepest * (1 + 1e-9), step


@given(peak=peaks, total=st.integers(1, 50), kind=st.sampled_from(KINDS))
def test_min_ratio_one_is_constant(peak: float, total: int, kind: str) -> None:
    schedule = ScheduleSection(kind=kind, warmup_steps=0, min_ratio=1.0)
    assert {learning_rate(step, total, peak, schedule) for step in range(total)} == {peak}


def test_figures_by_hand() -> None:
    linear = ScheduleSection(kind="linear", warmup_steps=2, min_ratio=0.5)
    assert [learning_rate(step, 7, 1.0, linear) for step in range(7)] == [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5]
    cosine = ScheduleSection(kind="cosine", warmup_steps=0, min_ratio=0.0)
    # 1 + cos of 0°, 30°, 60° ... 180°.
    found = [learning_rate(step, 7, 2.0, cosine) for step in range(7)]
    assert found == pytest.approx([2.0, 1.8660254, 1.5, 1.0, 0.5, 0.1339746, 0.0], abs=1e-7)
    constant = ScheduleSection(kind="constant", warmup_steps=4, min_ratio=0.1)
    assert [learning_rate(step, 6, 4.0, constant) for step in range(6)] == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]


def test_short_runs_have_a_rate() -> None:
    schedule = ScheduleSection(kind="cosine", warmup_steps=0, min_ratio=0.0)
    assert learning_rate(0, 1, 3.0, schedule) == 3.0
    warming = ScheduleSection(kind="cosine", warmup_steps=100, min_ratio=0.1)
    assert learning_rate(9, 10, 3.0, warming) == pytest.approx(0.3, rel=1e-15)


def test_steps_after_the_end_stay_at_the_lowest() -> None:
    schedule = ScheduleSection(kind="cosine", warmup_steps=1, min_ratio=0.25)
    assert learning_rate(500, 10, 2.0, schedule) == 0.5
