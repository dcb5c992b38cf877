"""Comparison of the states of two checkpoints."""

from pathlib import Path

import torch

from tests.helpers.checkpoints import read_whole
from z2all_ds.checkpoint.layout import WEIGHT
from z2all_ds.checkpoint.state_files import StateReader

MOMENTS = {"exp_avg", "exp_avg_sq"}


def assert_same_state(one: Path, other: Path) -> None:
    """Assert that master weights, moments and counters are bit-identical."""
    ours, theirs = StateReader(one), StateReader(other)
    assert ours.shapes == theirs.shapes
    assert ours.state_keys == theirs.state_keys == MOMENTS
    for fact in ("steps_taken", "engine"):
        assert ours.index[fact] == theirs.index[fact], fact
    for name in ours.shapes:
        for key in (WEIGHT, *MOMENTS):
            assert torch.equal(read_whole(ours, name, key), read_whole(theirs, name, key)), (name, key)
