"""SwiGLU: every backend against the reference, on the halves of one product."""

import pytest
import torch
from torch import Tensor

from tests.ops.comparing import assert_within_roundings, cases, function_of, random
from z2all_ds.ops.swiglu import reference

SHAPES = [(1, 1, 32), (2, 5, 96), (3, 7, 65)]
BACKENDS = cases("swiglu")
ALLOWED = {"fp32": 8.0, "bf16": 2.0}
"""Roundings: silu, its derivative and two products; a gate of 10 loses some of its digits in the exponential (seen: 3).
In bf16 the inside is fp32 (seen: 0.6)."""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_halves_of_one_product(name: str, device: str, shape: tuple[int, int, int], dtype: str) -> None:
    swiglu = function_of("swiglu", name, device, dtype)
    batch, tokens, width = shape
    fused = random(batch, tokens, 2 * width, dtype=dtype, device=device, scale=3.0)
    assert_within_roundings(
        lambda x: swiglu(*x.chunk(2, dim=-1)), lambda x: reference(*x.chunk(2, dim=-1)), [fused], ALLOWED
    )


@pytest.mark.parametrize(("name", "device"), BACKENDS)
@pytest.mark.parametrize("tokens", [1, 4])
def test_inputs_stay_what_they_were_through_the_backward_pass(name: str, device: str, tokens: int) -> None:
    swiglu = function_of("swiglu", name, device)
    gate, up = (random(1, tokens, 32, dtype="fp32", device=device, seed=seed).requires_grad_() for seed in (1, 2))
    before = gate.detach().clone(), up.detach().clone()
    out = swiglu(gate, up)
    assert isinstance(out, Tensor)
    (out * 3).sum().backward()
    assert torch.equal(gate, before[0])
    assert torch.equal(up, before[1])
    assert gate.grad is not None
    assert gate.grad.abs().sum() > 0


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_far_values_do_not_overflow(name: str, device: str) -> None:
    swiglu = function_of("swiglu", name, device)
    gate = torch.tensor([[[-200.0, -100.0, 0.0, 100.0, 200.0]]], device=device)
    out = swiglu(gate, torch.full_like(gate, 2.0))
    assert torch.equal(out, torch.tensor([[[-0.0, -0.0, 0.0, 200.0, 400.0]]], device=device)), out


@pytest.mark.parametrize("poisoned", [0, 1], ids=["gate", "up"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_nan_shows(name: str, device: str, poisoned: int) -> None:
    swiglu = function_of("swiglu", name, device)
    halves = [random(1, 2, 32, dtype="fp32", device=device, seed=seed) for seed in (1, 2)]
    halves[poisoned][0, 1, 3] = float("nan")
    out = swiglu(*halves)
    assert isinstance(out, Tensor)
    assert out.isnan().nonzero().tolist() == [[0, 1, 3]]


def test_gradients_are_the_derivatives() -> None:
    fused = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: reference(*x.chunk(2, dim=-1)), (fused,))
