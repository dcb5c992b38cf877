"""AdamW with bf16 moments: each step compared with the formula in fp64, and the result of many steps."""

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
"""Distance of two neighbours in bf16, relative to the lower, at most."""


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
            # A few roundings of fp32 (6e-8) of weights of about 1; a moment forgotten would be off by LR = 0.01.
            assert (weight.double() - want).abs().max() < 1e-6
            for found, true in zip(moments_of(optimizer, weight), (moment, square), strict=True):
                # Rounded to a neighbour, not further; fp32's own rounding is far below bf16's.
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
            # Near a power of two the step is that of the larger side.
            scale = torch.maximum(want.abs(), weight.detach().double().abs())
            assert ((weight.double() - want).abs() <= scale * STEP_OF_BF16 * 1.001 + 1e-6).all()


@pytest.mark.parametrize("device", DEVICES)
def test_kept_bits_make_bf16_weights_as_exact_as_fp32(device: str) -> None:
    """Weight and compensation together take every step that an fp32 weight takes, bit for bit."""
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
            # The nearest bf16: half a step off at most.
            assert ((weight.float() - other).abs() <= other.abs() * STEP_OF_BF16 / 2).all()


def drift(rounding: str | None, dtype: torch.dtype) -> float:
    """Returns the mean of weights after 1000 small steps down from 1, and the same in fp64."""
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
    """lr 1e-4 and weights of 1, where bf16 has steps of 1/256: rounded to nearest, every update is lost."""
    assert drift(None, torch.bfloat16) == pytest.approx(0.1)
    # What is in the weight is the nearest to 0.9, at most half of 2^-8 off.
    assert drift("kahan", torch.bfloat16) < 2**-9
    # 1000 roundings with at most half a step of 2^-8 each, over the mean of 4096 weights: sqrt(1000/4096) * 2^-9 = 1e-3
    # is one standard deviation at most; in fact far less, since the chance of rounding up is small.
    assert drift("stochastic", torch.bfloat16) < 1e-3
    assert drift("kahan", torch.float32) < 1e-4


def test_a_second_moment_keeps_moving() -> None:
    """beta2 = 0.999 changes it by 0.1 % per step, less than half a bf16 step; rounded to nearest, it never would."""
    weight = torch.nn.Parameter(torch.zeros(4096))
    optimizer = AdamWBf16([weight], lr=0.0, betas=(0.9, 0.999))
    weight.grad = torch.ones_like(weight)
    for _ in range(1000):
        optimizer.step()
    expected = 1 - 0.999**1000
    # Each step rounds by at most half of 2^-8 (standard deviation); decaying sums of 1000 over 4096 values: 1e-3.
    assert optimizer.state[weight]["exp_avg_sq"].double().mean().item() == pytest.approx(expected, abs=3e-3)


def test_tensors_and_steps_have_noise_of_their_own() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    optimizer = AdamWBf16(weights, lr=0.0, betas=(0.0, 0.0))
    seen = []
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.full_like(weight, 1 + 2**-9)
        optimizer.step()
        seen += [optimizer.state[weight]["exp_avg"].clone() for weight in weights]
    assert not any(torch.equal(seen[i], seen[j]) for i in range(4) for j in range(i))


def test_other_random_numbers_are_not_touched() -> None:
    weights = weights_of()
    optimizer = optimizer_of(weights)
    set_gradients(weights, 0)
    before = torch.get_rng_state()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_nan_gradient_shows(rounding: str, dtype: torch.dtype, device: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=dtype, device=device))
    optimizer = AdamWBf16([weight], rounding=rounding)  # type: ignore[arg-type]
    weight.grad = torch.tensor([1.0, float("nan"), 1.0], dtype=dtype, device=device)
    optimizer.step()
    assert weight.isnan().tolist() == [False, True, False]
    assert optimizer.state[weight]["exp_avg"].isnan().tolist() == [False, True, False]
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.isnan().tolist() == [False, True, False]


def test_in_pieces_it_follows_the_formula_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The assertions are those of the two tests that are called."""
    monkeypatch.setattr(chunks.flat_pieces, "__defaults__", (10,))
    monkeypatch.setattr(chunks.flat_gradient_pieces, "__defaults__", (10,))
    test_fp32_weights_follow_the_formula("cpu")
    test_kept_bits_make_bf16_weights_as_exact_as_fp32("cpu")
