"""RMSNorm: every backend against the reference."""

import pytest
import torch
from torch import Tensor

from tests.ops.comparing import assert_within_roundings, cases, function_of, random
from z2all_ds.ops.rms_norm import reference

SHAPES = [(1, 1, 32), (2, 5, 96), (3, 7, 160), (1, 33, 65)]
EPS = 1e-5
BACKENDS = cases("rms_norm")
ALLOWED = {"fp32": 8.0, "bf16": 2.0}
"""Roundings: the mean square sums in fp32 in another order, then come two products; the weight's gradient sums over
rows what has been rounded before (seen: 1.6 and 0.7)."""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_against_the_reference(name: str, device: str, shape: tuple[int, int, int], dtype: str) -> None:
    rms_norm = function_of("rms_norm", name, device, dtype)
    x = random(*shape, dtype=dtype, device=device)
    weight = random(shape[-1], dtype=dtype, device=device, seed=1)
    assert_within_roundings(lambda a, w: rms_norm(a, w, EPS), lambda a, w: reference(a, w, EPS), [x, weight], ALLOWED)


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_input_that_is_not_contiguous(name: str, device: str) -> None:
    rms_norm = function_of("rms_norm", name, device)
    wide = random(2, 5, 64, dtype="fp32", device=device)
    weight = random(32, dtype="fp32", device=device, seed=1)
    assert_within_roundings(
        lambda a, w: rms_norm(a[..., ::2], w, EPS), lambda a, w: reference(a[..., ::2], w, EPS), [wide, weight], ALLOWED
    )


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_eps_holds_up_a_row_of_zeros(name: str, device: str) -> None:
    rms_norm = function_of("rms_norm", name, device)
    x = torch.zeros(1, 2, 32, device=device)
    out = rms_norm(x, torch.ones(32, device=device), EPS)
    assert isinstance(out, Tensor)
    assert torch.equal(out, x)


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_rows_do_not_mix_and_nan_shows(name: str, device: str) -> None:
    rms_norm = function_of("rms_norm", name, device)
    x = random(1, 3, 32, dtype="fp32", device=device)
    x[0, 1, 4] = float("nan")
    out = rms_norm(x, torch.ones(32, device=device), EPS)
    assert isinstance(out, Tensor)
    assert out[0, 1].isnan().all()
    assert out[0, (0, 2)].isfinite().all()


def test_in_bf16_the_statistics_are_fp32() -> None:
    """256 squares of about 1 summed in bf16 would stop growing at 256 in steps of 2; the sum of fp32 does not."""
    x = random(1, 1, 4096, dtype="bf16", device="cpu")
    out = reference(x, torch.ones(4096, dtype=torch.bfloat16), EPS)
    want = x.double() * torch.rsqrt(x.double().pow(2).mean() + EPS)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, want.to(torch.bfloat16))


def test_gradients_are_the_derivatives() -> None:
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, w: reference(a, w, EPS), (x, weight))
