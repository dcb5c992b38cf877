"""SwiGLU and the matrix product after it: every backend compared with the reference, on a fused gate | up tensor."""

import pytest
import torch
from torch import Tensor

from tests.ops.comparing import assert_within_roundings, cases, function_of, on_gpu, random, small_integers
from z2all_ds.ops import gradient_sink
from z2all_ds.ops.linear import reference as linear
from z2all_ds.ops.swiglu import reference

# Some CPUs have no bf16 matrix products; torch warns once and falls back.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

SHAPES = [
    # batch, tokens, intermediate width, output width
    (1, 1, 32, 16),
    (2, 5, 96, 33),
    (3, 7, 65, 40),
    (1, 2, 1025, 8),
]
BACKENDS = cases("swiglu")
ALLOWED = {"fp32": 16.0, "bf16": 4.0}
"""Tolerance in roundings: silu, its derivative and two products; a gate of 10 loses some digits in the exponential;
then up to 1025 products are summed in a different order. In bf16, intermediate values and their gradients are rounded
(measured: 4.4 and 1.2)."""


def other_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the same as the plain backend of `linear`, but as another function, like fp8."""
    return linear(x, weight, bias)


def inputs(batch: int, tokens: int, width: int, after: int, dtype: str, device: str) -> list[Tensor]:
    """Return gate | up, weight and bias."""
    return [
        random(batch, tokens, 2 * width, dtype=dtype, device=device, scale=3.0),
        random(after, width, dtype=dtype, device=device, seed=1, scale=width**-0.5),
        random(after, dtype=dtype, device=device, seed=2),
    ]


@pytest.mark.parametrize("product", [linear, other_linear], ids=["plain-linear", "other-linear"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_backends_agree_with_the_reference(
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
def test_non_contiguous_inputs_give_the_same_result(name: str, device: str) -> None:
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
def test_forward_and_backward_do_not_modify_the_inputs(name: str, device: str, tokens: int) -> None:
    swiglu = function_of("swiglu", name, device)
    leaves = [leaf.requires_grad_() for leaf in inputs(1, tokens, 32, 16, "fp32", device)]
    before = [leaf.detach().clone() for leaf in leaves]
    (swiglu(*leaves, linear) * 3).sum().backward()
    assert all(torch.equal(leaf, old) for leaf, old in zip(leaves, before, strict=True))
    assert all(leaf.grad is not None and leaf.grad.abs().sum() > 0 for leaf in leaves)


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_large_gates_do_not_overflow(name: str, device: str) -> None:
    swiglu = function_of("swiglu", name, device)
    gate = torch.tensor([[[-200.0, -100.0, 0.0, 100.0, 200.0]]], device=device)
    gate_up = torch.cat((gate, torch.full_like(gate, 2.0)), dim=-1).requires_grad_()
    out = swiglu(gate_up, torch.eye(5, device=device), None, linear)
    assert torch.equal(out, torch.tensor([[[-0.0, -0.0, 0.0, 200.0, 400.0]]], device=device)), out
    out.sum().backward()
    # The derivative of silu is 0 for very negative gates and 1 for large ones, times 2; the gradient of up is silu.
    wanted = torch.tensor([[[0.0, 0.0, 1.0, 2.0, 2.0, 0.0, 0.0, 0.0, 100.0, 200.0]]], device=device)
    assert gate_up.grad is not None
    assert (gate_up.grad - wanted).abs().max() < 1e-30, gate_up.grad


@pytest.mark.parametrize("poisoned", [3, 35], ids=["gate", "up"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_nan_in_an_input_reaches_the_result_of_its_token_only(name: str, device: str, poisoned: int) -> None:
    swiglu = function_of("swiglu", name, device)
    gate_up = random(1, 2, 64, dtype="fp32", device=device)
    gate_up[0, 1, poisoned] = float("nan")
    gate_up.requires_grad_()
    out = swiglu(gate_up, torch.eye(32, device=device), None, linear)
    # The product with the weight spreads it over the whole row.
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
    # With a gate of 64, silu is the gate itself, so the intermediate values 64 * up are exact.
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
    # torch sums the gradient of the bias in the tokens' dtype.
    assert torch.equal(sinks[1], 1 + 2 * way.sum(0).float())
    assert weight.grad is None and bias.grad is None
    assert gate_up.grad is not None and gate_up.grad.any()


@pytest.mark.parametrize(("name", "device"), [pytest.param("triton", "cuda", marks=on_gpu)])
def test_more_tokens_than_the_second_axis_of_a_cuda_grid_allows_are_computed(name: str, device: str) -> None:
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
