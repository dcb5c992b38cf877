"""The outlook for a whole run: days, GPU hours, checkpoints, and failures in closed form and simulated."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.base.accounting import count_parameters
from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import ConfigError
from z2all_ds.plan import Estimate, Risks, Wishes, estimate, make_fleet
from z2all_ds.plan.outlook import (
    HOUR,
    MOST_FAILURES,
    SIMULATED_RUNS,
    Interruptions,
    Nodes,
    Outlook,
    best_interval,
    failure_probability,
    goodput,
    look_ahead,
    simulate,
)

RUN = load_run_config("z2all_1b")


def on(gpus: int = 64, **wishes: Any) -> Estimate:
    return estimate(RUN, make_fleet(Wishes(gpus=gpus, gpu="h100", **wishes)))


def ahead(of: Estimate, tokens: int = 10**11, **risks: float) -> Outlook:
    found = look_ahead(of, tokens, Risks(**risks))
    assert found is not None
    return found


@settings(max_examples=20, deadline=None)
@given(gpus=st.sampled_from((1, 8, 64)), tokens=st.integers(1, 10**13))
def test_days_and_gpu_hours_follow_from_the_step_time(gpus: int, tokens: int) -> None:
    of = on(gpus)
    outlook = ahead(of, tokens)
    assert of.time is not None
    for days, hours, step in zip(outlook.days, outlook.gpu_hours, (of.time.least, of.time.most), strict=True):
        assert days * 24 * gpus == pytest.approx(hours, rel=1e-12)
        assert days * 86400 == pytest.approx(tokens / (512 * 2048) * step, rel=1e-12)
    assert outlook.failures == pytest.approx(outlook.gpu_hours[1] / 50_000)
    assert 0 <= outlook.failure_probability <= 1


def test_a_checkpoint_has_12_bytes_per_parameter() -> None:
    outlook = ahead(on(disk_speed="2GB/s"))
    assert outlook.checkpoint_bytes == 12 * count_parameters(RUN.model.shape).total == 12 * 1_255_499_776
    assert outlook.write_seconds == outlook.checkpoint_bytes / 2e9
    assert outlook.save_seconds == outlook.checkpoint_bytes / 64 / 50e9


def test_more_failures_require_more_frequent_saves() -> None:
    # A fast disk, so that no save waits for the previous one.
    of = on(disk_speed="500GB/s")
    rare, usual, frequent = (ahead(of, gpu_hours_per_failure=hours) for hours in (10**6, 50_000, 2_000))
    assert rare.interval_steps > usual.interval_steps > frequent.interval_steps >= 1
    assert rare.interval_seconds > usual.interval_seconds > frequent.interval_seconds
    assert rare.goodput > usual.goodput > frequent.goodput > 0.9
    assert rare.failures < usual.failures < frequent.failures


def test_the_save_interval_is_at_least_the_write_time_and_one_step() -> None:
    slow_disk = ahead(on(disk_speed="10MB/s"))
    assert slow_disk.interval_seconds == slow_disk.write_seconds > 1000
    of = on()
    assert of.time is not None
    every_step = ahead(of, gpu_hours_per_failure=1e-6)
    assert every_step.interval_seconds >= of.time.most and every_step.interval_steps >= 1


def test_longer_restarts_reduce_the_goodput() -> None:
    of = on()
    assert ahead(of, restart_seconds=0).goodput > ahead(of, restart_seconds=3600).goodput


def test_a_fleet_that_fails_all_the_time_has_no_goodput() -> None:
    """Billions of failures are not simulated one by one."""
    outlook = ahead(on(), 10**15, gpu_hours_per_failure=1e-6)
    assert outlook.goodput == 0 and outlook.simulated.goodput == 0
    assert outlook.failures > 10**9
    assert outlook.simulated.failures == pytest.approx(MOST_FAILURES, rel=4 / (SIMULATED_RUNS * MOST_FAILURES) ** 0.5)


def test_there_is_no_outlook_without_a_known_peak() -> None:
    assert look_ahead(estimate(RUN, make_fleet(Wishes(gpus=8, gpu_memory="80GB"))), 10**11, Risks()) is None
    in_fp32 = load_run_config("z2all_1b", ["deepspeed=zero0"])
    assert look_ahead(estimate(in_fp32, make_fleet(Wishes(gpus=8, gpu="h100"))), 10**11, Risks()) is None


@pytest.mark.parametrize(
    ("risks", "start"),
    [
        ({"gpu_hours_per_failure": 0.0}, "--gpu-hours-per-failure 0.0: must be above 0"),
        ({"gpu_hours_per_failure": float("nan")}, "--gpu-hours-per-failure nan: must be above 0"),
        ({"restart_seconds": -1.0}, "--restart-seconds -1.0: must be 0 or more"),
        ({"restart_seconds": float("inf")}, "--restart-seconds inf: must be 0 or more"),
    ],
)
def test_invalid_risks_are_refused(risks: dict[str, float], start: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Risks(**risks)
    assert str(raised.value).startswith(start)


# Failures

DAY = 24 * HOUR

some_interruptions = st.builds(
    Interruptions,
    between=st.floats(HOUR, 300 * HOUR),
    restart=st.floats(0, 0.2 * HOUR),
    save=st.floats(1, 200),
    write=st.floats(0, 0.2 * HOUR),
)


def test_the_default_failure_rate_is_that_of_llama_3() -> None:
    """Llama 3 had 419 failures in 54 days on 16,384 GPUs."""
    between = Risks().seconds_between(16_384)
    assert 54 * DAY / between == pytest.approx(419, rel=0.02)
    assert failure_probability(between, between) == pytest.approx(1 - 1 / math.e)


@given(some_interruptions)
def test_no_other_save_interval_is_better(of: Interruptions) -> None:
    interval = best_interval(of)
    best = goodput(of, interval)
    assert all(goodput(of, interval * factor) <= best * (1 + 1e-12) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0))


@given(some_interruptions)
def test_the_best_interval_is_close_to_youngs_formula(of: Interruptions) -> None:
    youngs = math.sqrt(2 * of.save * of.between)
    # Daly adds a third of the save time and subtracts the whole save time; the remaining terms are smaller.
    assert best_interval(of) == pytest.approx(youngs - of.save * 2 / 3, rel=0.05 * of.save / youngs + 1e-9)


@pytest.mark.parametrize(
    "of",
    [
        Interruptions(between=5 * HOUR, restart=120, save=20),
        Interruptions(between=1 * HOUR, restart=600, save=60),
        Interruptions(between=2 * HOUR, restart=60, save=1, write=600),
        Interruptions(between=500, restart=300, save=30, write=30),
    ],
)
def test_simulated_goodput_agrees_with_the_closed_form(of: Interruptions) -> None:
    interval = best_interval(of)
    found = simulate(of, interval, Nodes(8), seconds=3000 * of.between, runs=20, seed=1)
    assert found.error < 0.01
    assert found.goodput == pytest.approx(goodput(of, interval), abs=4 * found.error)
    assert found.failures == pytest.approx(3000, rel=0.05)


def test_fast_restarts_and_saves_keep_the_goodput_of_ten_thousand_gpus_high() -> None:
    """With a failure every five hours, restarts of two minutes and saves of half a second lose little time."""
    of = Interruptions(Risks().seconds_between(10_000), restart=120, save=0.5, write=60)
    found = simulate(of, best_interval(of), Nodes(1250), 90 * DAY)
    assert 0.95 < found.goodput < 1
    slow = Interruptions(of.between, restart=1800, save=240)
    assert simulate(slow, best_interval(slow), Nodes(1250), 90 * DAY).goodput < found.goodput - 0.1


def test_without_spare_nodes_a_run_waits_for_repair_or_continues_more_slowly() -> None:
    of = Interruptions(between=10 * HOUR, restart=60, save=1)
    interval = best_interval(of)

    def share(**changes: int) -> float:
        settings: dict[str, Any] = {"training": 4, "least": 4, "repair": 5 * HOUR} | changes
        nodes = Nodes(**settings)
        return simulate(of, interval, nodes, 300 * DAY).goodput

    all_or_none, with_three, with_spare = share(), share(least=3), share(spare=4)
    assert all_or_none == pytest.approx(2 / 3, abs=0.03)  # in 5 of every 15 hours, one node is missing
    # A repaired node joins at the next restart, which happens when another one fails: mostly, three of four train.
    assert all_or_none < with_three < 3 / 4
    assert with_spare == pytest.approx(goodput(of, interval), abs=0.005)


def test_the_same_seed_gives_the_same_runs() -> None:
    of = Interruptions(between=HOUR, restart=60, save=1)
    assert simulate(of, 600, Nodes(2), DAY, seed=3) == simulate(of, 600, Nodes(2), DAY, seed=3)
    assert simulate(of, 600, Nodes(2), DAY, seed=3) != simulate(of, 600, Nodes(2), DAY, seed=4)


def test_goodput_is_zero_if_failures_come_faster_than_restarts() -> None:
    assert goodput(Interruptions(between=1, restart=5000, save=10), 600) == 0.0
