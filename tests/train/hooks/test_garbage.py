"""The steps at which Python's garbage collector runs during training."""

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from z2all_ds.base.config import load_run_config
from z2all_ds.train.hooks.garbage import GarbageCollection
from z2all_ds.train.hooks.hook import Step


class Knot:
    """An object that refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def collecting(every_steps: int) -> GarbageCollection:
    run = load_run_config(None, [f"train.collect_every={every_steps}"])
    garbage = GarbageCollection(SimpleNamespace(run=run))  # type: ignore[arg-type]
    garbage.on_start()
    return garbage


def step(number: int) -> Step:
    return Step(number, None, 0.1, None)  # type: ignore[arg-type]


@pytest.fixture
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_garbage_stays_until_the_step_that_collects(as_before: None) -> None:
    garbage = collecting(3)
    assert not gc.isenabled()
    for first in (1, 4):
        knot = weakref.ref(Knot())
        for number in (first, first + 1):
            garbage.after_record(step(number))
            assert knot() is not None
        garbage.after_record(step(first + 2))
        assert knot() is None
    garbage.close()
    assert gc.isenabled()


def test_objects_that_existed_before_training_are_collected_only_after_close(as_before: None) -> None:
    was_there = Knot()
    knot = weakref.ref(was_there)
    garbage = collecting(1)
    del was_there
    garbage.after_record(step(1))
    assert knot() is not None
    garbage.close()
    gc.collect()
    assert knot() is None


def test_automatic_collection_is_off_between_steps(as_before: None) -> None:
    garbage = collecting(1)
    knots = [weakref.ref(Knot()) for _ in range(20 * gc.get_threshold()[0])]
    assert all(knot() for knot in knots)
    garbage.after_record(step(1))
    assert not any(knot() for knot in knots)


def test_collect_every_0_leaves_collection_to_python() -> None:
    assert not GarbageCollection.is_wanted(load_run_config(None, ["train.collect_every=0"]))
    assert GarbageCollection.is_wanted(load_run_config(None, ["train.collect_every=5"]))
