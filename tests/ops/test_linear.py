"""Matrix products with and without a gradient sink, and in fp8."""

import pytest
import torch

from tests.ops.comparing import assert_within_roundings, cases, function_of, on_gpu, random, small_integers
from z2all_ds.ops import gradient_sink
from z2all_ds.ops.linear import reference

# Some CPUs have no bf16 matrix products; torch warns once and falls back.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

BACKENDS = [case for case in cases("linear") if case.values[0] == "torch"]
"""Backends that compute in the model's precision; fp8 has tolerances of its own."""
ALLOWED = {"fp32": 16.0, "bf16": 2.0}
"""Tolerance in roundings: up to 129 products are summed in a different order; bf16 products are summed in fp32 and
rounded once (measured: 2.1 and 0.4)."""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_result_and_input_gradient_agree_with_fp64(name: str, device: str, with_sinks: bool, dtype: str) -> None:
    linear = function_of("linear", name, device, dtype)
    x = random(2, 5, 129, dtype=dtype, device=device)
    weight = random(33, 129, dtype=dtype, device=device, seed=1, scale=129**-0.5).requires_grad_()
    bias = random(33, dtype=dtype, device=device, seed=2).requires_grad_()
    if with_sinks:
        for leaf in (weight, bias):
            gradient_sink.attach(leaf, torch.zeros(leaf.shape, device=device))
    assert_within_roundings(
        lambda a: linear(a, weight, bias),
        lambda a: torch.nn.functional.linear(a, weight.detach().double().cpu(), bias.detach().double().cpu()),
        [x],
        ALLOWED,
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("bias_too", [True, False])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_sink_gets_the_exact_sum_of_two_batches(name: str, device: str, bias_too: bool, dtype: str) -> None:
    linear = function_of("linear", name, device, dtype)
    weight = small_integers(7, 13, dtype=dtype, device=device).requires_grad_()
    bias = small_integers(7, dtype=dtype, device=device, seed=1).requires_grad_() if bias_too else None
    leaves = [weight, *([bias] if bias is not None else [])]
    for leaf in leaves:
        gradient_sink.attach(leaf, torch.full(leaf.shape, 3.0, device=device))
    wanted = 3 + torch.zeros(7, 13, dtype=torch.float64, device=device)
    wanted_bias = 3 + torch.zeros(7, device=device)
    for batch in range(2):
        # Not contiguous, and long enough for sums that bf16 cannot represent (above 256 its steps are 2 and more).
        x = small_integers(3, 50, 26, dtype=dtype, device=device, seed=2 + batch)[..., ::2].requires_grad_()
        way = small_integers(3, 50, 7, dtype=dtype, device=device, seed=4 + batch)
        (linear(x, weight, bias) * way).sum().backward()
        wanted_bias += way.flatten(0, 1).sum(0)  # the sum of one batch is in the tokens' dtype
        wanted += way.double().flatten(0, 1).T @ x.detach().double().flatten(0, 1)
    sink = gradient_sink.sink_of(weight)
    assert sink is not None and torch.equal(sink, wanted.float())
    assert wanted.abs().max() > 512
    assert all(leaf.grad is None for leaf in leaves)
    if bias is not None:
        sink = gradient_sink.sink_of(bias)
        assert sink is not None and torch.equal(sink, wanted_bias)


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_sink_equals_the_gradient_of_autograd(name: str, device: str) -> None:
    linear = function_of("linear", name, device)
    x = small_integers(40, 13, dtype="fp32", device=device)
    plain, sunk = (
        [small_integers(*shape, dtype="fp32", device=device, seed=1).requires_grad_() for shape in ((7, 13), (7,))]
        for _ in range(2)
    )
    for leaf in sunk:
        gradient_sink.attach(leaf, torch.zeros_like(leaf.detach()))
    for weight, bias in (plain, sunk):
        linear(x, weight, bias).pow(2).sum().backward()
    for want, have in zip(plain, sunk, strict=True):
        sink = gradient_sink.sink_of(have)
        assert want.grad is not None and sink is not None and torch.equal(sink, want.grad)


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_nan_shows_in_the_sink(name: str, device: str) -> None:
    linear = function_of("linear", name, device)
    x = small_integers(4, 3, dtype="fp32", device=device)
    x[1, 2] = float("nan")
    weight = small_integers(2, 3, dtype="fp32", device=device, seed=1).requires_grad_()
    gradient_sink.attach(weight, torch.zeros(2, 3, device=device))
    out = linear(x, weight, None)
    assert out.isnan().nonzero().tolist() == [[1, 0], [1, 1]]
    out.sum().backward()
    sink = gradient_sink.sink_of(weight)
    assert sink is not None
    assert sink.isnan().nonzero().tolist() == [[0, 2], [1, 2]]


def test_gradients_are_the_derivatives_with_and_without_a_sink() -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 4), (5,)))
    assert torch.autograd.gradcheck(reference, (x, weight, bias))
    for leaf in (weight, bias):
        gradient_sink.attach(leaf, torch.zeros_like(leaf.detach()))
    assert torch.autograd.gradcheck(lambda a: reference(a, weight, bias), (x,))


FP8_ROUNDING = {"e4m3": 0.038, "e5m2": 0.065}
"""Relative error (of norms) of a product of normally distributed factors with 3 and 2 fraction bits: each factor is off
by about 2.7 % (e4m3) or 5.3 % (e5m2), and the two errors are independent."""


FP8_BACKENDS = pytest.mark.parametrize("name", ["fp8", "fp8_torchao"])


@on_gpu[0]
@on_gpu[1]
@pytest.mark.parametrize(
    ("name", "with_sink"),
    [("fp8", False), ("fp8", True), ("fp8_torchao", False)],
    ids=["fp8", "fp8-sink", "fp8_torchao"],
)
def test_fp8_errors_do_not_exceed_the_rounding_of_fp8(name: str, with_sink: bool) -> None:
    linear = function_of("linear", name, "cuda", "bf16")
    x = random(2, 128, 256, dtype="bf16", device="cuda", scale=3.0).requires_grad_()
    weight = random(384, 256, dtype="bf16", device="cuda", seed=1, scale=0.02).requires_grad_()
    bias = random(384, dtype="bf16", device="cuda", seed=2).requires_grad_()
    dy = random(2, 128, 384, dtype="bf16", device="cuda", seed=3, scale=1e-4)
    if with_sink:
        gradient_sink.attach(weight, torch.zeros(weight.shape, device="cuda"))
    linear(x, weight, bias).backward(dy)
    y = linear(x, weight, bias).detach()
    wide_x, wide_w, wide_dy = (t.detach().double().flatten(0, -2) for t in (x, weight, dy))
    d_weight = gradient_sink.sink_of(weight) if with_sink else weight.grad
    assert x.grad is not None
    assert bias.grad is not None
    assert d_weight is not None
    for found, wanted, allowed in (
        (y.flatten(0, 1), wide_x @ wide_w.T + bias.detach().double(), FP8_ROUNDING["e4m3"]),
        (x.grad.flatten(0, 1), wide_dy @ wide_w, FP8_ROUNDING["e5m2"]),
        (d_weight, wide_dy.T @ wide_x, FP8_ROUNDING["e5m2"]),
        (bias.grad, wide_dy.sum(0), 0.01),
    ):
        off = (found.double() - wanted).norm() / wanted.norm()
        assert off <= allowed, off
    assert (weight.grad is None) == with_sink


@on_gpu[0]
@on_gpu[1]
@pytest.mark.parametrize("shape", [(5, 256), (16, 250)], ids=["tokens", "width"])
@FP8_BACKENDS
def test_sizes_that_fp8_does_not_support_use_the_reference(name: str, shape: tuple[int, int]) -> None:
    linear = function_of("linear", name, "cuda", "bf16")
    x = random(*shape, dtype="bf16", device="cuda")
    weight = random(32, shape[1], dtype="bf16", device="cuda", seed=1)
    assert torch.equal(linear(x, weight, None), reference(x, weight, None))


@on_gpu[0]
@on_gpu[1]
@pytest.mark.parametrize("poisoned", ["x", "weight"])
@FP8_BACKENDS
def test_nan_in_an_input_reaches_the_fp8_result(name: str, poisoned: str) -> None:
    linear = function_of("linear", name, "cuda", "bf16")
    tensors = {
        "x": random(32, 64, dtype="bf16", device="cuda"),
        "weight": random(16, 64, dtype="bf16", device="cuda", seed=1),
    }
    tensors[poisoned][3, 5] = float("nan")
    assert linear(tensors["x"], tensors["weight"], None).isnan().any()


@on_gpu[0]
@on_gpu[1]
@FP8_BACKENDS
def test_zeros_in_fp8_give_zero_results_and_gradients(name: str) -> None:
    linear = function_of("linear", name, "cuda", "bf16")
    x = torch.zeros(16, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = random(16, 32, dtype="bf16", device="cuda", seed=1).requires_grad_()
    y = linear(x, weight, None)
    y.backward(torch.zeros_like(y))
    assert y.count_nonzero() == 0
    assert weight.grad is not None
    assert weight.grad.count_nonzero() == 0
