"""Detection of spikes from plain numbers, without training."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.base.config import load_run_config
from z2all_ds.base.config.sections import GuardSection
from z2all_ds.base.errors import ConfigError
from z2all_ds.train.guard.spike_guard import (
    LEAST_DEVIATION,
    LEAST_DEVIATION_OF_NORMS,
    TO_STANDARD_DEVIATION,
    Outlier,
    SpikeGuard,
)

SECTION = GuardSection(min_steps=8, window_steps=16)


def guard_after(*losses: float, section: GuardSection = SECTION) -> SpikeGuard:
    guard = SpikeGuard(section)
    for loss in losses:
        guard.accept({"loss": loss})
    return guard


def test_a_falling_loss_is_accepted_and_a_jump_is_an_outlier() -> None:
    guard = guard_after(*(8.0 - 0.1 * step for step in range(20)))
    assert guard.outliers({"loss": 6.1}) == []
    (found,) = guard.outliers({"loss": 12.0})
    assert found.name == "loss" and found.value == 12.0 and 6.5 < (found.limit or 0) < 12.0


def test_a_low_value_is_never_an_outlier() -> None:
    assert guard_after(*[5.0] * 10).outliers({"loss": 0.01}) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_an_outlier_from_the_first_step(value: float) -> None:
    (found,) = SpikeGuard(SECTION).outliers({"loss": value})
    assert found.limit is None


def test_finite_values_are_outliers_only_after_min_steps() -> None:
    assert guard_after(*[5.0] * 7).outliers({"loss": 1e9}) == []
    assert guard_after(*[5.0] * 8).outliers({"loss": 1e9})


def test_after_equal_values_small_changes_are_allowed() -> None:
    limit = guard_after(*[5.0] * 10).limit("loss")
    assert limit == pytest.approx(5.0 * math.exp(SECTION.deviations * LEAST_DEVIATION))


def test_gradient_norms_have_a_higher_limit_than_losses() -> None:
    guard = SpikeGuard(SECTION)
    for _ in range(10):
        guard.accept({"loss": 2.0, "grad_norm": 2.0})
    assert [found.name for found in guard.outliers({"loss": 6.0, "grad_norm": 6.0})] == ["loss"]
    assert guard.outliers({"grad_norm": 2.0 * math.exp(SECTION.deviations * LEAST_DEVIATION_OF_NORMS) + 0.1})


def test_each_domain_is_judged_by_its_own_values() -> None:
    guard = SpikeGuard(SECTION)
    for _ in range(10):
        guard.accept({"loss_of_zh": 3.0, "loss_of_code": 1.0})
    assert [found.name for found in guard.outliers({"loss_of_zh": 3.1, "loss_of_code": 3.1})] == ["loss_of_code"]


def test_a_loss_of_zero_is_accepted_and_not_remembered() -> None:
    guard = guard_after(0.0, *[1.0] * 8)
    assert guard.outliers({"loss": 0.0}) == [] and guard.limit("loss") is not None


@given(st.lists(st.floats(4.0, 5.0), min_size=16, max_size=16), st.integers(0, 15))
def test_an_extreme_value_in_the_window_hardly_moves_the_limit(usual: list[float], place: int) -> None:
    """It is at most one of the latest four values and affects two of fifteen changes, so both medians hardly change."""
    values = [*usual[:place], 1e30, *usual[place + 1 :]]
    limit = guard_after(*values).limit("loss")
    widest = TO_STANDARD_DEVIATION * math.log(5.0 / 4.0) / math.sqrt(2)
    assert limit is not None and limit <= 5.0 * math.exp(SECTION.deviations * widest) * (1 + 1e-12)


def test_the_state_survives_a_round_trip_through_json() -> None:
    guard = guard_after(*[5.0, 5.5, 4.5] * 5)
    for bad in (True, False, True):
        guard.count(bad)
    other = SpikeGuard(SECTION)
    other.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert other.limit("loss") == guard.limit("loss")
    assert other.bad_steps == 2


def test_bad_steps_stay_counted_after_a_rollback_and_expire_with_the_window() -> None:
    guard = guard_after()
    saved = guard.state_dict()
    guard.count(bad=True)
    guard.load_state_dict(saved)
    assert guard.bad_steps == 1
    for _ in range(SECTION.window_steps):
        guard.count(bad=False)
    assert guard.bad_steps == 0


def test_outliers_are_readable_as_text() -> None:
    assert str(Outlier("loss_of_zh", 12.3456, 7.0)) == "loss_of_zh 12.35 (limit 7)"
    assert str(Outlier("grad_norm", math.nan, None)) == "grad_norm nan"


def test_a_window_too_short_to_judge_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"guard: min_steps=64 must not exceed window_steps=32"):
        load_run_config(None, ["guard.min_steps=64", "guard.window_steps=32"])
