"""RMSNorm with residual addition: every backend compared with the reference."""

import pytest
import torch
from torch import Tensor

from tests.ops.comparing import DTYPES, assert_within_roundings, cases, function_of, random, results_and_gradients
from z2all_ds.ops import gradient_sink
from z2all_ds.ops.rms_norm import reference

SHAPES = [(1, 1, 32), (2, 5, 96), (3, 7, 160), (1, 33, 65), (2, 3, 2049), (1, 700, 33)]
"""Shapes, also with more rows than kernel programs on a GPU, and with more columns than a warp reads at a time."""
EPS = 1e-5
BACKENDS = cases("rms_norm")
ALLOWED = {"fp32": 8.0, "bf16": 2.0}
"""Tolerance in roundings: the mean square is summed in fp32 in a different order, then come two products; the weight's
gradient sums rounded values over rows (measured: 1.6 and 0.7)."""


def rows(shape: tuple[int, int, int], dtype: str, device: str) -> list[Tensor]:
    """Return x, residual and weight."""
    x, residual = (random(*shape, dtype=dtype, device=device, seed=seed) for seed in (0, 2))
    return [x, residual, random(shape[-1], dtype=dtype, device=device, seed=1)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_backends_agree_with_the_reference_without_a_residual(
    name: str, device: str, shape: tuple[int, int, int], dtype: str
) -> None:
    rms_norm = function_of("rms_norm", name, device, dtype)
    x, _, weight = rows(shape, dtype, device)
    assert_within_roundings(
        lambda a, w: rms_norm(a, None, w, EPS), lambda a, w: reference(a, None, w, EPS), [x, weight], ALLOWED
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_backends_agree_with_the_reference_with_a_residual(
    name: str, device: str, shape: tuple[int, int, int], dtype: str
) -> None:
    rms_norm = function_of("rms_norm", name, device, dtype)
    assert_within_roundings(
        lambda a, r, w: rms_norm(a, r, w, EPS),
        lambda a, r, w: reference(a, r, w, EPS),
        rows(shape, dtype, device),
        ALLOWED,
    )


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_an_fp32_residual_of_a_bf16_model_is_summed_exactly(name: str, device: str) -> None:
    """With x and weight in bf16 and the residual in fp32, the sum is exact and its gradient stays fp32."""
    rms_norm = function_of("rms_norm", name, device, "bf16")
    x, _, weight = rows((2, 5, 96), "bf16", device)
    residual = random(2, 5, 96, dtype="fp32", device=device, seed=2)
    normed, stream = rms_norm(x, residual, weight, EPS)
    assert normed.dtype == torch.bfloat16
    assert torch.equal(stream, x.float() + residual)
    assert_within_roundings(
        lambda a, r, w: rms_norm(a, r, w, EPS), lambda a, r, w: reference(a, r, w, EPS), [x, residual, weight], ALLOWED
    )
    *_, dx, d_residual, d_weight = results_and_gradients(lambda a, r, w: rms_norm(a, r, w, EPS), [x, residual, weight])
    assert [dx.dtype, d_residual.dtype, d_weight.dtype] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert torch.equal(dx, d_residual.bfloat16())


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_an_fp32_input_of_a_bf16_model_is_normalised_to_bf16(name: str, device: str) -> None:
    """The input of the first layer is the embedding converted to fp32, without a residual."""
    rms_norm = function_of("rms_norm", name, device, "bf16")
    x = random(2, 5, 96, dtype="fp32", device=device)
    weight = random(96, dtype="bf16", device=device, seed=1)
    normed, stream = rms_norm(x, None, weight, EPS)
    assert stream is x
    want = reference(x.double().cpu(), None, weight.double().cpu(), EPS)[0]
    assert normed.dtype == torch.bfloat16
    # Rounded before and after the product with the weight.
    assert (normed.double().cpu() - want).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * want.abs().max()


@pytest.mark.parametrize("used", ["normed", "stream"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_gradients_are_correct_if_only_one_result_is_used(name: str, device: str, dtype: str, used: str) -> None:
    """Nothing reads the residual stream after the last layer. An unused weight gets no gradient, or zeros."""
    rms_norm = function_of("rms_norm", name, device, dtype)
    x, residual, weight = (leaf.requires_grad_() for leaf in rows((2, 5, 96), dtype, device))
    x64, residual64, weight64 = (leaf.detach().double().cpu().requires_grad_() for leaf in (x, residual, weight))
    index = ["normed", "stream"].index(used)
    rms_norm(x, residual, weight, EPS)[index].float().pow(2).sum().backward()
    reference(x64, residual64, weight64, EPS)[index].pow(2).sum().backward()
    for have, want in ((x, x64), (residual, residual64), (weight, weight64)):
        if want.grad is None:
            assert have.grad is None or not have.grad.any()
            continue
        assert have.grad is not None
        off = (have.grad.double().cpu() - want.grad).abs().max() / want.grad.abs().max()
        # Squaring adds one rounding before and one after the norm.
        assert off <= 2 * ALLOWED[dtype] * torch.finfo(DTYPES[dtype]).eps


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_non_contiguous_inputs_give_the_same_result(name: str, device: str) -> None:
    rms_norm = function_of("rms_norm", name, device)
    wide, residual = (random(2, 5, 64, dtype="fp32", device=device, seed=seed) for seed in (0, 2))
    weight = random(32, dtype="fp32", device=device, seed=1)
    assert_within_roundings(
        lambda a, r, w: rms_norm(a[..., ::2], r[..., 32:], w, EPS),
        lambda a, r, w: reference(a[..., ::2], r[..., 32:], w, EPS),
        [wide, residual, weight],
        ALLOWED,
    )


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_forward_and_backward_do_not_modify_the_inputs(name: str, device: str) -> None:
    rms_norm = function_of("rms_norm", name, device)
    leaves = [leaf.requires_grad_() for leaf in rows((2, 5, 96), "fp32", device)]
    before = [leaf.detach().clone() for leaf in leaves]
    normed, stream = rms_norm(*leaves, EPS)
    (normed * stream).sum().backward()
    assert all(torch.equal(leaf, old) for leaf, old in zip(leaves, before, strict=True))
    assert all(leaf.grad is not None and leaf.grad.abs().sum() > 0 for leaf in leaves)


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_weight_gradient_goes_either_to_the_sink_or_to_autograd(name: str, device: str) -> None:
    """The package's own kernels add to the sink; other backends may return the gradient to autograd."""
    rms_norm = function_of("rms_norm", name, device, "bf16")
    x, residual, weight = rows((2, 5, 96), "bf16", device)
    weight.requires_grad_()
    rms_norm(x, residual, weight, EPS)[0].float().sum().backward()
    assert weight.grad is not None
    plain = weight.grad.float()
    weight.grad = None
    sink = torch.ones(96, device=device)
    gradient_sink.attach(weight, sink)
    rms_norm(x, residual, weight, EPS)[0].float().sum().backward()
    places = [place for place in (sink - 1, weight.grad) if place is not None and place.any()]
    assert len(places) == 1
    # A sum of ten values: fp32 in the sink, rounded to bf16 without a sink.
    assert (places[0] - plain).abs().max() <= torch.finfo(torch.bfloat16).eps * plain.abs().max()


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_a_row_of_zeros_stays_zero(name: str, device: str) -> None:
    rms_norm = function_of("rms_norm", name, device)
    x = torch.zeros(1, 2, 32, device=device)
    normed, stream = rms_norm(x, x.clone(), torch.ones(32, device=device), EPS)
    assert torch.equal(normed, x)
    assert torch.equal(stream, x)


@pytest.mark.parametrize("poisoned", ["x", "residual"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_nan_affects_only_its_row(name: str, device: str, poisoned: str) -> None:
    rms_norm = function_of("rms_norm", name, device)
    x, residual = (random(1, 3, 32, dtype="fp32", device=device, seed=seed).requires_grad_() for seed in (0, 2))
    weight = torch.ones(32, device=device, requires_grad=True)
    with torch.no_grad():
        (x if poisoned == "x" else residual)[0, 1, 4] = float("nan")
    normed, stream = rms_norm(x, residual, weight, EPS)
    assert normed[0, 1].isnan().all()
    assert normed[0, (0, 2)].isfinite().all()
    assert stream.isnan().nonzero().tolist() == [[0, 1, 4]]
    normed.sum().backward()
    assert x.grad is not None and residual.grad is not None and weight.grad is not None
    for gradient in (x.grad, residual.grad):
        assert gradient[0, 1].isnan().all()
        assert gradient[0, (0, 2)].isfinite().all()
    assert weight.grad.isnan().all()


def test_bf16_rows_are_normalised_with_fp32_statistics() -> None:
    """A bf16 sum of squares of about 1 would stop growing at 256, where its steps become 2; an fp32 sum does not."""
    x = random(1, 1, 4096, dtype="bf16", device="cpu")
    out, _ = reference(x, None, torch.ones(4096, dtype=torch.bfloat16), EPS)
    want = x.double() * torch.rsqrt(x.double().pow(2).mean() + EPS)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, want.to(torch.bfloat16))


def test_gradients_are_the_derivatives() -> None:
    x, residual = (torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, r, w: reference(a, r, w, EPS), (x, residual, weight))
    assert torch.autograd.gradcheck(lambda a, w: reference(a, None, w, EPS)[0], (x, weight))
