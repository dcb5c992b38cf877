"""Tests of stochastic rounding to bf16, which is unbiased, and of sums that keep the discarded bits."""

import pytest
import torch
from torch import Tensor

from tests.ops.comparing import on_gpu
from z2all_ds.zero.optimizers.rounding import join, round_stochastically, seed_from, split

DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]
GPU_NAN_BITS = 0x7FFFFFFF


def generator(device: str, seed: int = 0) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def below_and_above(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the neighbouring bf16 numbers towards zero and away from zero as fp64, computed by truncating bits."""
    towards_zero = x.view(torch.int32) & ~0xFFFF
    exact = towards_zero == x.view(torch.int32)
    away = torch.where(exact, towards_zero, towards_zero + 0x10000)
    return towards_zero.view(torch.float32).double(), away.view(torch.float32).double()


@pytest.mark.parametrize("device", DEVICES)
def test_rounding_chooses_both_neighbours_and_nothing_else(device: str) -> None:
    x = torch.randn(100_000, generator=generator("cpu")).mul(torch.logspace(-30, 30, 100_000)).to(device)
    rounded = round_stochastically(x, generator(device))
    assert rounded.dtype == torch.bfloat16
    lower, upper = below_and_above(x)
    is_lower, is_upper = rounded.double() == lower, rounded.double() == upper
    assert (is_lower | is_upper).all()
    # Fractions are uniform, so each neighbour is chosen in half of the cases; 0.01 is 6 standard deviations of
    # 0.5 / sqrt(100,000).
    assert abs(is_lower.double().mean().item() - 0.5) < 0.01


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [1 + 2**-12, -(1 + 2**-9), 3.14159, -1e-20, 1e-39])
def test_rounding_is_unbiased(value: float, device: str) -> None:
    draws = 1_000_000
    x = torch.full((draws,), value, dtype=torch.float32, device=device)
    mean = round_stochastically(x, generator(device)).double().mean().item()
    lower, upper = (bound[0].item() for bound in below_and_above(x[:1]))
    # The standard deviation of one draw is at most half the distance between the neighbours; six standard deviations of
    # the mean are allowed.
    assert abs(mean - x[0].double().item()) < 6 * 0.5 * abs(upper - lower) / draws**0.5


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_numbers_do_not_change(device: str) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(device)
    rounded = round_stochastically(every.float(), generator(device))
    nan = every.isnan()
    assert torch.equal(rounded[~nan].view(torch.int16), every[~nan].view(torch.int16))  # also signed zeros and inf
    assert rounded[nan].isnan().all() and nan.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sign", [0, -(1 << 31)])
def test_the_nan_of_a_gpu_stays_nan(device: str, sign: int) -> None:
    """All bits of exponent and mantissa are set: added noise would overflow into the sign and turn NaN into zero."""
    x = torch.full((1000,), GPU_NAN_BITS | sign, dtype=torch.int32, device=device).view(torch.float32)
    assert x.isnan().all()
    assert round_stochastically(x, generator(device)).isnan().all()


def test_seeds_are_reproducible_and_distinct() -> None:
    assert seed_from(1, 2) == 2112530514  # the same in every process and on every machine
    assert len({seed_from(number, step) for number in range(50) for step in range(50)}) == 2500
    assert seed_from(1, 23) != seed_from(12, 3)


def test_the_same_seed_gives_the_same_bits() -> None:
    x = torch.randn(1000, generator=generator("cpu"))
    first, second, other = (round_stochastically(x, generator("cpu", seed)) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def every_kind_of_number() -> Tensor:
    """Return all upper halves of fp32, each with lower halves around the middle and at the ends of their range. Ties,
    carries, infinities and NaN are included."""
    upper = torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return (upper + lower).flatten().to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_join_restores_every_bit_of_a_split_number(device: str) -> None:
    x = every_kind_of_number().to(device)
    upper, lower = split(x)
    assert (upper.dtype, lower.dtype) == (torch.bfloat16, torch.int16)
    numbers = ~x.isnan()
    assert torch.equal(join(upper, lower)[numbers].view(torch.int32), x[numbers].view(torch.int32))
    assert upper[~numbers].isnan().all() and join(upper, lower)[~numbers].isnan().all()
    assert numbers.any() and not numbers.all()


def test_the_upper_part_of_a_split_is_the_nearest_bf16_number() -> None:
    x = every_kind_of_number()
    x = x[x.isfinite()]
    upper, _ = split(x)
    nearest = x.to(torch.bfloat16)
    tie = x.view(torch.int32) & 0xFFFF == 0x8000  # torch rounds ties to even, `split` away from zero
    assert torch.equal(upper[~tie], nearest[~tie])
    assert ((upper.double() - x.double()).abs()[tie] == (nearest.double() - x.double()).abs()[tie]).all()


def test_split_sums_keep_the_bits_that_bf16_loses() -> None:
    """1e-4 is added to 1 a thousand times. The next bf16 number is 1/128 away, so plain bf16 never changes."""
    plain = torch.ones(1, dtype=torch.bfloat16)
    exact = torch.ones(1)
    upper, lower = split(exact)
    for _ in range(1000):
        plain += 1e-4
        exact += 1e-4
        upper, lower = split(join(upper, lower) + 1e-4)
    assert plain.item() == 1
    assert torch.equal(join(upper, lower), exact)
