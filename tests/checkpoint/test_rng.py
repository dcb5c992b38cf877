"""Random generators that continue from a saved state, which is stored without pickled code."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from z2all_ds.checkpoint.rng import rng_state, set_rng_state


def draw() -> tuple[list[float], list[float], list[float], list[float]]:
    """Return some numbers of every generator; an odd count of normal ones, which are generated in pairs."""
    return (
        torch.randn(33).tolist(),
        [random.random(), random.gauss(0, 1), float(random.randrange(10**6))],
        numpy.random.standard_normal(3).tolist(),
        torch.rand(5, dtype=torch.float64).tolist(),
    )


@pytest.fixture(autouse=True)
def _generators_as_before() -> Iterator[None]:
    before = rng_state()
    yield
    set_rng_state(before)


def test_the_same_numbers_follow_from_a_saved_state(tmp_path: Path) -> None:
    torch.manual_seed(1)
    random.seed(2)
    numpy.random.seed(3)
    draw()  # leaves a cached normal number in the generators of Python and numpy
    torch.save(rng_state(), tmp_path / "rng.pt")
    expected = [draw(), draw()]
    assert expected[0] != expected[1]
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(99)
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert [draw(), draw()] == expected


def test_reading_the_state_draws_no_numbers() -> None:
    before = rng_state()
    expected = draw()
    set_rng_state(before)
    rng_state()
    assert draw() == expected


def test_a_state_is_a_copy() -> None:
    state = rng_state()
    first = draw()
    set_rng_state(state)
    assert draw() == first
    set_rng_state(state)
    assert draw() == first
