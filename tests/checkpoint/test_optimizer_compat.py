"""An optimizer goes on from the state of its own kind, or from that of another Adam."""

import itertools

import pytest

from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint.optimizer_compat import ADAMS, require_same_states
from z2all_ds.zero.optimizers import KINDS


def test_kinds_are_known() -> None:
    assert set(KINDS) > ADAMS


def test_only_adams_of_the_same_moments_are_exchanged() -> None:
    for saved, here in itertools.product(KINDS, KINDS):
        if saved == here or {saved, here} <= ADAMS:
            require_same_states(saved, here)
            continue
        with pytest.raises(CheckpointError) as caught:
            require_same_states(saved, here)
        assert str(caught.value) == (
            f"the checkpoint's optimizer is {saved}: this run uses {here}, which has an incompatible optimizer state."
            f" Set optimizer.kind={saved}, or export the checkpoint and start a new run."
        )
