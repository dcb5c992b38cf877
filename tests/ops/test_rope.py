"""Rotary positions: every backend against the reference, on q and k as parts of one fused tensor."""

import pytest
import torch
from torch import Tensor

from tests.ops.comparing import assert_within_roundings, cases, function_of, random
from z2all_ds.ops.rope import reference

SHAPES = [
    # batch, tokens, heads, kv heads, head size
    pytest.param(1, 1, 4, 2, 32, id="one-token"),
    pytest.param(2, 5, 4, 1, 64, id="one-kv-head"),
    pytest.param(2, 7, 3, 3, 96, id="equal-heads"),
]
BACKENDS = cases("rope")
ALLOWED = {"fp32": 4.0, "bf16": 2.0}
"""Roundings: two products and a sum, each rounded once (seen: 1)."""


def cos_and_sin(batch: int, tokens: int, size: int) -> tuple[Tensor, Tensor]:
    """Positions that differ from row to row and start again inside a row, as in packed documents."""
    positions = torch.arange(batch * tokens).view(batch, tokens) % max(2, tokens - 1)
    half = positions[..., None] * 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.cat((half, half), dim=-1)
    return angles.cos(), angles.sin()


def split(fused: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """q and k as the model has them: views of one [batch, tokens, heads, size] tensor, neither contiguous."""
    q, k, _ = (part.transpose(1, 2) for part in fused.split([heads, kv_heads, kv_heads], dim=2))
    return q, k


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("batch", "tokens", "heads", "kv_heads", "size"), SHAPES)
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_against_the_reference(
    name: str, device: str, batch: int, tokens: int, heads: int, kv_heads: int, size: int, dtype: str
) -> None:
    rope = function_of("rope", name, device, dtype)
    fused = random(batch, tokens, heads + 2 * kv_heads, size, dtype=dtype, device=device)
    # The truth uses the same rounded table: the rounding of the table is not the op's.
    table = [part.to(fused.dtype) for part in cos_and_sin(batch, tokens, size)]
    assert_within_roundings(
        lambda x: rope(*split(x, heads, kv_heads), *(part.to(device) for part in table)),
        lambda x: reference(*split(x, heads, kv_heads), *(part.double() for part in table)),
        [fused],
        ALLOWED,
    )


@pytest.mark.parametrize(("name", "device"), BACKENDS)
@pytest.mark.parametrize("contiguous_tokens", [1, 6])
def test_inputs_stay_what_they_were(name: str, device: str, contiguous_tokens: int) -> None:
    rope = function_of("rope", name, device)
    fused = random(1, contiguous_tokens, 6, 32, dtype="fp32", device=device)
    q, k = split(fused, 4, 1)
    lone = random(1, contiguous_tokens, 4, 32, dtype="fp32", device=device, seed=5).transpose(1, 2)
    fused_before, lone_before = fused.clone(), lone.clone()
    table = [part.float().to(device) for part in cos_and_sin(1, contiguous_tokens, 32)]
    q_turned, _ = rope(q, k, *table)
    rope(lone, lone[:, :2], *table)
    assert torch.equal(fused, fused_before)
    assert torch.equal(lone, lone_before)
    assert contiguous_tokens == 1 or not torch.equal(q_turned, q)


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_position_zero_changes_nothing(name: str, device: str) -> None:
    rope = function_of("rope", name, device)
    q, k = split(random(2, 3, 6, 32, dtype="fp32", device=device), 4, 1)
    cos, sin = torch.ones(2, 3, 32, device=device), torch.zeros(2, 3, 32, device=device)
    q_turned, k_turned = rope(q, k, cos, sin)
    assert torch.equal(q_turned, q)
    assert torch.equal(k_turned, k)


def test_scores_depend_on_distance_alone() -> None:
    """What rotary positions are for; in fp64, so the tolerance only covers cos and sin of the sums of angles."""
    q = torch.randn(1, 1, 1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    k = torch.randn(1, 1, 1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def at(position: int) -> tuple[Tensor, Tensor]:
        half = position * 100.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
        angles = torch.cat((half, half))[None, None]
        return reference(q, k, angles.cos(), angles.sin())

    def score(q_position: int, k_position: int) -> float:
        return (at(q_position)[0] * at(k_position)[1]).sum().item()

    assert score(9, 4) == pytest.approx(score(25, 20), abs=1e-12)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_nan_shows(name: str, device: str) -> None:
    rope = function_of("rope", name, device)
    q, k = split(random(1, 2, 6, 32, dtype="fp32", device=device), 4, 1)
    q[0, 2, 1, 3] = float("nan")
    table = [part.float().to(device) for part in cos_and_sin(1, 2, 32)]
    q_turned, k_turned = rope(q, k, *table)
    assert q_turned[0, 2, 1].isnan().sum() == 2  # the pair that was turned together
    assert k_turned.isfinite().all()


def test_gradients_are_the_derivatives() -> None:
    fused = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    table = cos_and_sin(2, 3, 4)
    assert torch.autograd.gradcheck(lambda x: reference(*split(x, 2, 1), *table), (fused,))
