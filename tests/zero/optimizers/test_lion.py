"""Tests of Lion: comparison with its formula in fp64."""

import pytest
import torch

from tests.ops.comparing import on_gpu
from tests.zero.optimizers.stepping import BETAS, LR, groups_of, lion_formula, set_gradients, weights_of
from z2all_ds.zero.optimizers import chunks
from z2all_ds.zero.optimizers.lion import Lion

DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_steps_follow_the_formula(device: str) -> None:
    weights = weights_of(device=device)
    optimizer = Lion(groups_of(weights), lr=LR, betas=BETAS)
    moments = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
    for step in range(1, 21):
        set_gradients(weights, step)
        expected = [lion_formula(weight, moment) for weight, moment in zip(weights, moments, strict=True)]
        optimizer.step()
        for weight, (want, moment) in zip(weights, expected, strict=True):
            # A single step from the current weights has a few fp32 roundings (6e-8) of weights of about 1. A wrong sign
            # would cause an error of 2 LR = 0.02.
            assert (weight.double() - want).abs().max() < 1e-6
            assert (optimizer.state[weight]["momentum"].double() - moment).abs().max() < 1e-6
        moments = [moment for _, moment in expected]


def test_updates_in_pieces_give_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = weights_of(), weights_of()
    for weights, size in ((whole, chunks.CHUNK), (pieces, 10)):
        monkeypatch.setattr(chunks.flat_pieces, "__defaults__", (size,))
        monkeypatch.setattr(chunks.flat_gradient_pieces, "__defaults__", (size,))
        monkeypatch.setattr(chunks.batches, "__defaults__", (size,))
        optimizer = Lion(groups_of(weights), lr=LR, betas=BETAS)
        for step in range(3):
            set_gradients(weights, step)
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(whole, pieces, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_nonfinite_gradient_makes_its_weight_nan(bad: float) -> None:
    """The sign of NaN is 0, so the weight would silently not change."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Lion([weight], lr=LR)
    weight.grad = torch.tensor([1.0, bad, 0.0])
    optimizer.step()
    assert weight.isnan().tolist() == [False, True, False]
    assert weight[2] == 1  # zero gradient


def test_weights_without_a_gradient_do_not_change() -> None:
    weights = weights_of()
    before = [weight.detach().clone() for weight in weights]
    optimizer = Lion(groups_of(weights), lr=LR)
    optimizer.step()
    assert all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))
    assert not optimizer.state


def test_gradients_may_have_any_strides() -> None:
    straight, turned = (torch.nn.Parameter(torch.ones(4, 6)) for _ in range(2))
    gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    straight.grad, turned.grad = gradient.T.contiguous(), gradient.T
    for weight in (straight, turned):
        Lion([weight], lr=LR).step()
    assert torch.equal(straight, turned)
