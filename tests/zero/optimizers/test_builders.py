"""Tests of optimizers built as in training: Adams follow the formula in fp64, and saved states resume bit for bit."""

import io

import pytest
import torch

from tests.ops.comparing import on_gpu
from tests.zero.optimizers.stepping import BETAS, EPS, LR, adamw_formula
from z2all_ds.base.config.sections import OptimizerSection
from z2all_ds.zero.optimizers import KINDS, OptimizerSituation, build_optimizer, choose_optimizer

NUMEL = 8192
"""A multiple of 256 and more than 4096; otherwise 8-bit optimizers keep their states in full precision."""
OTHER_ADAMS_ON_GPU = ["adamw", "ds_fused_adam", "apex_adam", "adamw_8bit"]
ADAMS_ON_GPU = [*OTHER_ADAMS_ON_GPU, "adamw_bf16"]
# A step is LR x (moment / root), about LR. bf16 moments have an error of at most 2^-7 in either direction, in the three
# steps before the last. 8-bit moments have few levels, and the smallest square here is a quarter of the largest in its
# block.
ALLOWED_AFTER_STEPS = {"adamw_bf16": 0.05 * LR, "adamw_8bit": 0.5 * LR}
STEPS = 4


def flat_weight(device: str) -> torch.nn.Parameter:
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    return torch.nn.Parameter(values.to(device))


def build(kind: str, weight: torch.nn.Parameter, device: str) -> torch.optim.Optimizer:
    section = OptimizerSection.model_validate({"kind": kind, "lr": LR, "betas": BETAS, "eps": EPS})
    situation = OptimizerSituation(device, stage=2, offload=kind == "ds_cpu_adam")
    if refusal := KINDS[kind].why_not(situation):
        pytest.skip(f"{kind}: {refusal}")
    return build_optimizer(choose_optimizer(section, situation), [{"params": [weight], "weight_decay": 0.0}], section)


def step(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter, number: int) -> None:
    """Take a step with gradients between 1 and 2: 8-bit blocks need second moments of similar size."""
    values = 1 + torch.rand(NUMEL, generator=torch.Generator().manual_seed(number))
    weight.grad = values.to(weight.device)
    for group in optimizer.param_groups:
        group["lr"] = LR  # a plain number at every step, as in the training loop
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        *(pytest.param(kind, "cpu") for kind in ("adamw", "adamw_bf16", "adamw_8bit")),
        *(pytest.param(kind, "cuda", marks=on_gpu) for kind in ADAMS_ON_GPU),
    ],
)
def test_adams_follow_the_formula(kind: str, device: str) -> None:
    weight = flat_weight(device)
    optimizer = build(kind, weight, device)
    truth = weight.detach().double().cpu()
    moment, square = torch.zeros(2, NUMEL, dtype=torch.float64)
    for number in range(1, STEPS + 1):
        step(optimizer, weight, number)
        truth.grad = weight.grad.double().cpu()
        truth, moment, square = adamw_formula(truth, moment, square, number)
    off = (weight.detach().double().cpu() - truth).abs().max().item()
    # Weights are up to 4, so a rounding error is up to 2.4e-7 in each of four steps.
    assert off < ALLOWED_AFTER_STEPS.get(kind, 2e-6)
    assert (truth - flat_weight("cpu").double()).abs().min() > (STEPS - 1) * LR  # the weights have moved


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        *(pytest.param(kind, "cpu") for kind in ("adamw", "lion", "adafactor", "adamw_8bit")),
        *(pytest.param(kind, "cuda", marks=on_gpu) for kind in (*OTHER_ADAMS_ON_GPU, "lion", "adafactor")),
    ],
)
def test_a_saved_state_resumes_bit_identically(kind: str, device: str) -> None:
    weight = flat_weight(device)
    optimizer = build(kind, weight, device)
    for number in range(3):
        step(optimizer, weight, number)
    other = torch.nn.Parameter(weight.detach().clone())
    resumed = build(kind, other, device)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    # torchao's 8-bit states are a tensor subclass, which `weights_only=True` does not accept.
    resumed.load_state_dict(torch.load(saved, weights_only=False))
    for number in range(3, 6):
        step(optimizer, weight, number)
        step(resumed, other, number)
    assert torch.equal(weight, other)
    assert not torch.equal(weight, flat_weight(device))


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        *(pytest.param(kind, "cpu") for kind in ("adamw", "adamw_bf16", "lion", "adafactor")),
        *(pytest.param(kind, "cuda", marks=on_gpu) for kind in ("adamw", "ds_fused_adam", "adamw_bf16", "lion")),
    ],
)
def test_a_nan_gradient_makes_its_weight_nan(kind: str, device: str) -> None:
    weight = flat_weight(device)
    optimizer = build(kind, weight, device)
    step(optimizer, weight, 0)
    assert weight.isfinite().all()
    weight.grad[7] = float("nan")
    optimizer.step()
    assert weight[7].isnan()
