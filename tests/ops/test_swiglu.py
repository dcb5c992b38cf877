"""SwiGLU and the product after it: every backend against the reference, on gate | up as one product gives them."""

import pytest
import torch
from torch import Tensor

from tests.ops.comparing import assert_within_roundings, cases, function_of, on_gpu, random, small_integers
from z2all_ds.ops import gradient_sink
from z2all_ds.ops.linear import reference as linear
from z2all_ds.ops.swiglu import reference

# Some CPUs have no bf16 products; torch says so once and takes another way.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

SHAPES = [
    # batch, tokens, width between, width after
    (1, 1, 32, 16),
    (2, 5, 96, 33),
    (3, 7, 65, 40),
    (1, 2, 1025, 8),
]
BACKENDS = cases("swiglu")
ALLOWED = {"fp32": 16.0, "bf16": 4.0}
"""Roundings: silu, its derivative and two products; a gate of 10 loses some of its digits in the exponential; then sums
of up to 1025 products in another order. In bf16 what lies between is rounded, and its gradient (seen: 4.4 and 1.2)."""


def other_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Not the plain backend of `linear`, as fp8 is not."""
    return linear(x, weight, bias)


def inputs(batch: int, tokens: int, width: int, after: int, dtype: str, device: str) -> list[Tensor]:
    """gate | up, weight, bias."""
    return [
        random(batch, tokens, 2 * width, dtype=dtype, device=device, scale=3.0),
        random(after, width, dtype=dtype, device=device, seed=1, scale=width**-0.5),
        random(after, dtype=dtype, device=device, seed=2),
    ]


@pytest.mark.parametrize("product", [linear, other_linear], ids=["plain-linear", "other-linear"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_against_the_reference(
    name: str, device: str, shape: tuple[int, int, int, int], dtype: str, product: object
) -> None:
    swiglu = function_of("swiglu", name, device, dtype)
    gate_up, weight, bias = inputs(*shape, dtype, device)
    assert_within_roundings(
        lambda x, w, b: swiglu(x, w, b, product),
        lambda x, w, b: reference(x, w, b, linear),
        [gate_up, weight, bias],
        ALLOWED,
    )
    assert_within_roundings(
        lambda x, w: swiglu(x, w, None, product), lambda x, w: reference(x, w, None, linear), [gate_up, weight], ALLOWED
    )


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_input_that_is_not_contiguous(name: str, device: str) -> None:
    swiglu = function_of("swiglu", name, device)
    gate_up, weight, _ = inputs(2, 7, 48, 24, "fp32", device)
    assert_within_roundings(
        lambda x, w: swiglu(x[:, 1:5, ::2], w[:, ::2], None, linear),
        lambda x, w: reference(x[:, 1:5, ::2], w[:, ::2], None, linear),
        [gate_up, weight],
        ALLOWED,
    )


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_inputs_stay_what_they_were_through_the_backward_pass(name: str, device: str, tokens: int) -> None:
    swiglu = function_of("swiglu", name, device)
    leaves = [leaf.requires_grad_() for leaf in inputs(1, tokens, 32, 16, "fp32", device)]
    before = [leaf.detach().clone() for leaf in leaves]
    (swiglu(*leaves, linear) * 3).sum().backward()
    assert all(torch.equal(leaf, old) for leaf, old in zip(leaves, before, strict=True))
    assert all(leaf.grad is not None and leaf.grad.abs().sum() > 0 for leaf in leaves)


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_far_values_do_not_overflow(name: str, device: str) -> None:
    swiglu = function_of("swiglu", name, device)
    gate = torch.tensor([[[-200.0, -100.0, 0.0, 100.0, 200.0]]], device=device)
    gate_up = torch.cat((gate, torch.full_like(gate, 2.0)), dim=-1).requires_grad_()
    out = swiglu(gate_up, torch.eye(5, device=device), None, linear)
    assert torch.equal(out, torch.tensor([[[-0.0, -0.0, 0.0, 200.0, 400.0]]], device=device)), out
    out.sum().backward()
    # silu's derivative is 0 far below and 1 far above, times 2; up's gradient is silu itself.
    wanted = torch.tensor([[[0.0, 0.0, 1.0, 2.0, 2.0, 0.0, 0.0, 0.0, 100.0, 200.0]]], device=device)
    assert gate_up.grad is not None
    assert (gate_up.grad - wanted).abs().max() < 1e-30, gate_up.grad


@pytest.mark.parametrize("poisoned", [3, 35], ids=["gate", "up"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_nan_shows(name: str, device: str, poisoned: int) -> None:
    swiglu = function_of("swiglu", name, device)
    gate_up = random(1, 2, 64, dtype="fp32", device=device)
    gate_up[0, 1, poisoned] = float("nan")
    gate_up.requires_grad_()
    out = swiglu(gate_up, torch.eye(32, device=device), None, linear)
    # The product with the weight takes it to the whole row.
    assert out[0, 1].isnan().all()
    assert out[0, 0].isfinite().all()
    out[0, 1].sum().backward()
    assert gate_up.grad is not None
    assert gate_up.grad[0, 1].isnan().any()
    assert gate_up.grad[0, 0].isfinite().all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_weight_gradient_goes_into_its_sink(name: str, device: str, dtype: str) -> None:
    swiglu = function_of("swiglu", name, device, dtype)
    # A gate of 64: silu is the gate itself, so that what lies between is exact: 64 * up / 8.
    up = small_integers(40, 12, dtype=dtype, device=device) / 8
    gate_up = torch.cat((torch.full_like(up, 64.0), up), dim=-1).requires_grad_()
    weight = small_integers(5, 12, dtype=dtype, device=device, seed=1).requires_grad_()
    bias = small_integers(5, dtype=dtype, device=device, seed=2).requires_grad_()
    way = small_integers(40, 5, dtype=dtype, device=device, seed=3)
    sinks = [torch.ones(leaf.shape, device=device) for leaf in (weight, bias)]
    for leaf, sink in zip((weight, bias), sinks, strict=True):
        gradient_sink.attach(leaf, sink)
    for _ in range(2):
        (swiglu(gate_up, weight, bias, linear) * way).sum().backward()
    between = 64 * up.double()
    assert torch.equal(sinks[0], (1 + 2 * way.double().T @ between).float())
    # torch sums the bias's gradient in the tokens' dtype.
    assert torch.equal(sinks[1], 1 + 2 * way.sum(0).float())
    assert weight.grad is None and bias.grad is None
    assert gate_up.grad is not None and gate_up.grad.any()


@pytest.mark.parametrize(("name", "device"), [pytest.param("triton", "cuda", marks=on_gpu)])
def test_more_tokens_than_the_short_axis_of_a_grid_has(name: str, device: str) -> None:
    swiglu = function_of("swiglu", name, device)
    gate_up, weight, _ = inputs(1, 70_000, 4, 3, "fp32", device)
    assert_within_roundings(
        lambda x: swiglu(x, weight, None, linear),
        lambda x: reference(x, weight.double().cpu(), None, linear),
        [gate_up],
        ALLOWED,
    )


def test_gradients_are_the_derivatives() -> None:
    gate_up = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *leaves: reference(*leaves, linear), (gate_up, weight, bias))
