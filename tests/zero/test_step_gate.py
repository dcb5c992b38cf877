"""Tests of the step gate: skipped steps leave every bit of weights and moments unchanged, under every stage."""

from typing import Any

import pytest
import torch

from tests.zero.engines import tiny_engine, train
from z2all_ds.zero.step_gate import StepGate


def bits_of(engine: Any) -> list[torch.Tensor]:
    """Return copies of the weights and the optimizer states."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    kept = [value for state in inner.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in (*engine.module.parameters(), *kept)]


@pytest.mark.parametrize("deepspeed", ["zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"])
def test_a_refused_step_changes_no_bit_of_weights_and_states(deepspeed: str) -> None:
    with tiny_engine("cpu", f"deepspeed={deepspeed}") as (engine, _):
        asked: list[float | None] = []
        answers = iter([True, False, True])

        def allows(grad_norm: float | None) -> bool:
            asked.append(grad_norm)
            return next(answers)

        gate = StepGate(engine, allows)
        train(engine, 1)
        assert gate.take_answer() is True
        before = bits_of(engine)
        train(engine, 1)
        assert gate.take_answer() is False
        closed = bits_of(engine)
        assert len(closed) == len(before) and all(torch.equal(a, b) for a, b in zip(before, closed, strict=True))
        train(engine, 1)
        assert gate.take_answer() is True
        assert not all(torch.equal(a, b) for a, b in zip(before, bits_of(engine), strict=True))
        assert len(asked) == 3, "asked once a step, however many groups there are"
        # The second and third norms come from the same weights and batches.
        assert asked[1] is not None and asked[1] > 0 and asked[2] == asked[1] != asked[0]


def test_the_gate_is_not_asked_about_steps_that_deepspeed_skips() -> None:
    with tiny_engine("cpu", "deepspeed=zero2") as (engine, _):
        gate = StepGate(engine, lambda norm: True)
        with torch.no_grad():
            next(engine.module.parameters()).fill_(torch.nan)
        train(engine, 1)
        assert gate.take_answer() is None
