"""Failures: the closed form against brute force, and the simulation against the closed form."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from z2all_ds.plan.failures import (
    HOUR,
    Interruptions,
    Nodes,
    best_interval,
    failure_probability,
    goodput,
    seconds_between_failures,
    simulate,
)

from z2all_ds.base.errors import ConfigError

DAY = 24 * HOUR

some_interruptions = st.builds(
    Interruptions,
    between=st.floats(HOUR, 300 * HOUR),
    restart=st.floats(0, 0.2 * HOUR),
    save=st.floats(1, 200),
    write=st.floats(0, 0.2 * HOUR),
)


def test_the_fleet_of_llama_3() -> None:
    """419 failures in 54 days of 16,384 GPUs."""
    between = seconds_between_failures(16_384)
    assert 54 * DAY / between == pytest.approx(419, rel=0.02)
    assert failure_probability(between, between) == pytest.approx(1 - 1 / math.e)


@given(some_interruptions)
def test_no_other_interval_is_better(of: Interruptions) -> None:
    interval = best_interval(of)
    best = goodput(of, interval)
    assert all(goodput(of, interval * factor) <= best * (1 + 1e-12) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0))


@given(some_interruptions)
def test_it_is_near_youngs_where_saves_are_short(of: Interruptions) -> None:
    youngs = math.sqrt(2 * of.save * of.between)
    # Daly's correction to it is a third of the save, of first order; what is left is of the second.
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
def test_simulated_runs_come_out_as_the_closed_form(of: Interruptions) -> None:
    interval = best_interval(of)
    found = simulate(of, interval, Nodes(8), seconds=3000 * of.between, runs=20, seed=1)
    assert found.error < 0.01
    assert found.goodput == pytest.approx(goodput(of, interval), abs=4 * found.error)
    assert found.failures == pytest.approx(3000, rel=0.05)


def test_ten_thousand_gpus() -> None:
    """Failures every five hours: a restart of two minutes and a save that takes no time lose little."""
    of = Interruptions(seconds_between_failures(10_000), restart=120, save=0.5, write=60)
    found = simulate(of, best_interval(of), Nodes(1250), 90 * DAY)
    assert 0.95 < found.goodput < 1
    slow = Interruptions(of.between, restart=1800, save=240)
    assert simulate(slow, best_interval(slow), Nodes(1250), 90 * DAY).goodput < found.goodput - 0.1


def test_without_spares_a_repair_is_waited_for_or_goes_on_slower() -> None:
    of = Interruptions(between=10 * HOUR, restart=60, save=1)
    interval = best_interval(of)

    def share(**changes: int) -> float:
        nodes = Nodes(**{"training": 4, "least": 4, "repair": 5 * HOUR} | changes)
        return simulate(of, interval, nodes, 300 * DAY).goodput

    all_or_none, with_three, with_spare = share(), share(least=3), share(spare=4)
    assert all_or_none == pytest.approx(2 / 3, abs=0.03)  # 5 of every 15 hours there is one too few
    # A node that is back is taken in at the next restart, which is because another has gone: three of four, mostly.
    assert all_or_none < with_three < 3 / 4
    assert with_spare == pytest.approx(goodput(of, interval), abs=0.005)


def test_the_same_seed_gives_the_same_runs() -> None:
    of = Interruptions(between=HOUR, restart=60, save=1)
    assert simulate(of, 600, Nodes(2), DAY, seed=3) == simulate(of, 600, Nodes(2), DAY, seed=3)
    assert simulate(of, 600, Nodes(2), DAY, seed=3) != simulate(of, 600, Nodes(2), DAY, seed=4)


def test_where_failures_come_faster_than_restarts_nothing_is_done() -> None:
    assert goodput(Interruptions(between=1, restart=5000, save=10), 600) == 0.0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Interruptions(0, 1, 1), "time between failures = 0 s: must be more than zero"),
        (lambda: Interruptions(1, -1, 1), "restart time = -1 s: must be zero or more"),
        (lambda: Interruptions(1, 1, math.nan), "time a save takes = nan s"),
        (lambda: seconds_between_failures(0), "number of GPUs = 0: must be at least 1"),
        (lambda: seconds_between_failures(8, 0.0), "GPU hours per failure = 0.0: must be more than zero"),
        (lambda: goodput(Interruptions(1, 1, 1), 0), "interval between saves = 0 s: must be more than zero"),
        (lambda: Nodes(2, least=3), "2 nodes, 0 spare, at least 3"),
        (lambda: simulate(Interruptions(1, 1, 1), 1, Nodes(1), 10, runs=1), "1 simulated runs of 10 s"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(wrong, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError) as error:
        wrong()
    assert str(error.value).startswith(said) and "\n" not in str(error.value)
