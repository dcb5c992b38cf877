"""Loss on fixed tokens before saving and after loading: differences are detected; measuring has no side effects."""

import re

import pytest
import torch

from tests.zero.engines import tiny_engine, train
from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint.fixed_tokens import Probe
from z2all_ds.checkpoint.rng import rng_state
from z2all_ds.train.continuity import measure, require_continuity


def probe(loss: float, dtype: str = "fp32") -> Probe:
    return Probe(16, dtype, loss)


@pytest.mark.parametrize("json", ["zero0", "zero2", "zero3"])
def test_measuring_changes_neither_training_nor_random_state(json: str) -> None:
    losses = []
    for probed in (False, True):
        with tiny_engine("cpu", f"deepspeed={json}") as (engine, _):
            found = []
            for _ in range(3):
                if probed:
                    before, steps = rng_state()["torch"], engine.micro_steps
                    assert measure(engine, 16, "fp32") == measure(engine, 16, "fp32")
                    assert torch.equal(rng_state()["torch"], before) and engine.micro_steps == steps
                    assert engine.module.training
                found += train(engine, 2)
            losses.append(found)
    assert losses[0] == losses[1]


def test_a_changed_weight_and_changed_positions_are_detected() -> None:
    with tiny_engine("cpu", "deepspeed=zero0") as (engine, _):
        train(engine, 3)
        saved = measure(engine, 16, "fp32")
        engine.module.set_rope_theta(500.0)
        with pytest.raises(CheckpointError):
            require_continuity(saved, measure(engine, 16, "fp32"), "step_00000003")
        engine.module.set_rope_theta(10000.0)
        assert require_continuity(saved, measure(engine, 16, "fp32"), "step_00000003") == 0
        with torch.no_grad():
            next(engine.module.parameters())[0] += 0.01
        with pytest.raises(CheckpointError):
            require_continuity(saved, measure(engine, 16, "fp32"), "step_00000003")


def test_the_tolerance_depends_on_the_precision() -> None:
    require_continuity(probe(4.0), probe(4.000003), "c")
    require_continuity(probe(4.0, "bf16"), probe(4.007, "fp32"), "c")
    for saved, now in [
        (probe(4.0), probe(4.00001)),
        (probe(4.0, "bf16"), probe(4.01, "bf16")),
        (probe(4.0), probe(float("nan"))),
        (probe(4.0), probe(float("inf"), "bf16")),
    ]:
        with pytest.raises(CheckpointError, match=re.escape("on the same tokens when it was saved")):
            require_continuity(saved, now, "c")
