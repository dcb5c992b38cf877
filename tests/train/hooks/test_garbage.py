"""When Python's garbage collector runs while training."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from z2all_ds.train.hooks.garbage import GarbageInStep


class Knot:
    """Refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_garbage_stays_until_the_step_that_collects(as_before: None) -> None:
    garbage = GarbageInStep(3)
    assert not gc.isenabled()
    for first in (1, 4):
        knot = weakref.ref(Knot())
        for step in (first, first + 1):
            garbage.after_step(step)
            assert knot() is not None
        garbage.after_step(first + 2)
        assert knot() is None
    garbage.close()
    assert gc.isenabled()


def test_what_was_there_before_is_looked_through_again_after_the_end(as_before: None) -> None:
    was_there = Knot()
    knot = weakref.ref(was_there)
    garbage = GarbageInStep(1)
    del was_there
    garbage.after_step(1)
    assert knot() is not None
    garbage.close()
    gc.collect()
    assert knot() is None


def test_nothing_is_collected_in_time_that_python_would_collect_by_itself(as_before: None) -> None:
    garbage = GarbageInStep(1)
    knots = [weakref.ref(Knot()) for _ in range(20 * gc.get_threshold()[0])]
    assert all(knot() for knot in knots)
    garbage.after_step(1)
    assert not any(knot() for knot in knots)


def test_0_leaves_it_to_python() -> None:
    garbage = GarbageInStep(0)
    knot = weakref.ref(Knot())
    garbage.after_step(0)
    assert gc.isenabled() and gc.get_freeze_count() == 0
    garbage.close()
    assert gc.isenabled()
    gc.collect()
    assert knot() is None
