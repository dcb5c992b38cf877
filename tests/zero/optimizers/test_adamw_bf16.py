"""Tests of AdamW with bf16 moments: single steps compared with the formula in fp64, and the result of many steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.comparing import on_gpu
from tests.zero.optimizers.stepping import BETAS, EPS, LR, adamw_formula, groups_of, set_gradients, weights_of
from z2all_ds.zero.optimizers import chunks
from z2all_ds.zero.optimizers.adamw_bf16 import AdamWBf16
from z2all_ds.zero.optimizers.rounding import join

DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]
ROUNDINGS = ["kahan", "stochastic"]
STEP_OF_BF16 = 2**-7
"""Largest distance between neighbouring bf16 numbers, relative to the smaller one."""


def optimizer_of(weights: list[torch.nn.Parameter], rounding: str = "kahan") -> AdamWBf16:
    return AdamWBf16(groups_of(weights), lr=LR, betas=BETAS, eps=EPS, rounding=rounding)  # type: ignore[arg-type]


def moments_of(optimizer: AdamWBf16, weight: Tensor) -> tuple[Tensor, Tensor]:
    state = optimizer.state[weight]
    if not state:
        return torch.zeros_like(weight, dtype=torch.float64), torch.zeros_like(weight, dtype=torch.float64)
    return state["exp_avg"].double(), state["exp_avg_sq"].double()


@pytest.mark.parametrize("device", DEVICES)
def test_fp32_weights_follow_the_formula(device: str) -> None:
    weights = weights_of(device=device)
    optimizer = optimizer_of(weights)
    for step in range(1, 21):
        set_gradients(weights, step)
        expected = [adamw_formula(weight, *moments_of(optimizer, weight), step) for weight in weights]
        optimizer.step()
        for weight, (want, moment, square) in zip(weights, expected, strict=True):
            # A few fp32 roundings (6e-8) of weights of about 1; an omitted moment would cause an error of 0.01 (LR).
            assert (weight.double() - want).abs().max() < 1e-6
            for found, true in zip(moments_of(optimizer, weight), (moment, square), strict=True):
                # Rounded to one of the two neighbours; rounding errors of fp32 are far smaller than those of bf16.
                assert ((found - true).abs() <= true.abs() * STEP_OF_BF16 * 1.001 + 1e-30).all()


@pytest.mark.parametrize("device", DEVICES)
def test_stochastic_bf16_weights_follow_the_formula(device: str) -> None:
    weights = weights_of(torch.bfloat16, device)
    optimizer = optimizer_of(weights, "stochastic")
    for step in range(1, 21):
        set_gradients(weights, step)
        expected = [adamw_formula(weight, *moments_of(optimizer, weight), step)[0] for weight in weights]
        optimizer.step()
        for weight, want in zip(weights, expected, strict=True):
            # Near a power of two, the distance to the next larger number counts.
            scale = torch.maximum(want.abs(), weight.detach().double().abs())
            assert ((weight.double() - want).abs() <= scale * STEP_OF_BF16 * 1.001 + 1e-6).all()


@pytest.mark.parametrize("device", DEVICES)
def test_kept_bits_make_bf16_weights_as_exact_as_fp32(device: str) -> None:
    """Weight and compensation together equal an fp32 weight after every step, bit for bit."""
    small = weights_of(torch.bfloat16, device)
    large = [torch.nn.Parameter(weight.detach().float()) for weight in small]
    optimizers = optimizer_of(small), optimizer_of(large)
    for step in range(20):
        set_gradients(small, step)
        for weight, other in zip(small, large, strict=True):
            other.grad = weight.grad.float()
        for optimizer in optimizers:
            optimizer.step()
        for weight, other in zip(small, large, strict=True):
            assert torch.equal(join(weight, optimizers[0].state[weight]["compensation"]), other)
            assert (weight.float() - other).abs().max() > 0
            # The weight is the nearest bf16 number: the error is at most half the distance between neighbours.
            assert ((weight.float() - other).abs() <= other.abs() * STEP_OF_BF16 / 2).all()


def drift(rounding: str | None, dtype: torch.dtype) -> float:
    """Return the error of the mean weight, compared with fp64, after 1000 small steps down from 1."""
    weight = torch.nn.Parameter(torch.ones(4096, dtype=dtype))
    truth = torch.nn.Parameter(torch.ones(4096, dtype=torch.float64))
    settings: dict[str, Any] = {"lr": 1e-4, "betas": BETAS, "eps": EPS}
    optimizer: torch.optim.Optimizer = torch.optim.AdamW([weight], weight_decay=0.0, **settings)
    if rounding:
        optimizer = AdamWBf16([weight], rounding=rounding, **settings)  # type: ignore[arg-type]
    reference = torch.optim.AdamW([truth], weight_decay=0.0, **settings)
    for _ in range(1000):
        weight.grad, truth.grad = torch.ones_like(weight), torch.ones_like(truth)
        optimizer.step()
        reference.step()
    assert truth.mean().item() == pytest.approx(0.9)
    return abs(weight.double().mean().item() - truth.mean().item())


def test_small_updates_are_not_lost() -> None:
    """Updates are 1e-4, and below 1 the next bf16 number is 1/256 away: rounding to nearest would lose every update."""
    assert drift(None, torch.bfloat16) == pytest.approx(0.1)
    # The weight is the bf16 number nearest to 0.9, with an error of at most half of 2^-8.
    assert drift("kahan", torch.bfloat16) < 2**-9
    # Each of 1000 roundings has a standard deviation of at most half of 2^-8, and the mean is over 4096 weights:
    # sqrt(1000/4096) * 2^-9 = 1e-3 is an upper bound of the standard deviation. The real one is far smaller, because
    # a weight rarely moves to the next number.
    assert drift("stochastic", torch.bfloat16) < 1e-3
    assert drift("kahan", torch.float32) < 1e-4


def test_the_second_moment_keeps_changing() -> None:
    """With beta2 = 0.999 it changes by 0.1 % per step, less than half the distance between bf16 numbers, so rounding to
    nearest would never change it."""
    weight = torch.nn.Parameter(torch.zeros(4096))
    optimizer = AdamWBf16([weight], lr=0.0, betas=(0.9, 0.999))
    weight.grad = torch.ones_like(weight)
    for _ in range(1000):
        optimizer.step()
    expected = 1 - 0.999**1000
    # The standard deviation of one rounding is at most half of 2^-8; that of a decaying sum of 1000 roundings, averaged
    # over 4096 values, is at most 1e-3.
    assert optimizer.state[weight]["exp_avg_sq"].double().mean().item() == pytest.approx(expected, abs=3e-3)


def test_every_tensor_and_step_has_different_noise() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    optimizer = AdamWBf16(weights, lr=0.0, betas=(0.0, 0.0))
    seen = []
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.full_like(weight, 1 + 2**-9)
        optimizer.step()
        seen += [optimizer.state[weight]["exp_avg"].clone() for weight in weights]
    assert not any(torch.equal(seen[i], seen[j]) for i in range(4) for j in range(i))


def test_the_global_random_state_does_not_change() -> None:
    weights = weights_of()
    optimizer = optimizer_of(weights)
    set_gradients(weights, 0)
    before = torch.get_rng_state()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_nan_gradient_makes_only_its_weight_and_moment_nan(rounding: str, dtype: torch.dtype, device: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=dtype, device=device))
    optimizer = AdamWBf16([weight], rounding=rounding)  # type: ignore[arg-type]
    weight.grad = torch.tensor([1.0, float("nan"), 1.0], dtype=dtype, device=device)
    optimizer.step()
    assert weight.isnan().tolist() == [False, True, False]
    assert optimizer.state[weight]["exp_avg"].isnan().tolist() == [False, True, False]
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.isnan().tolist() == [False, True, False]


def test_weights_updated_in_pieces_follow_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two tests called here make the assertions."""
    monkeypatch.setattr(chunks.flat_pieces, "__defaults__", (10,))
    monkeypatch.setattr(chunks.flat_gradient_pieces, "__defaults__", (10,))
    test_fp32_weights_follow_the_formula("cpu")
    test_kept_bits_make_bf16_weights_as_exact_as_fp32("cpu")
