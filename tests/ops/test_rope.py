"""Rotary positions: every backend compared with the reference, on the heads of one fused product."""

from collections.abc import Callable

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
    pytest.param(3, 11, 17, 9, 40, id="odd-counts"),
    pytest.param(1, 3, 1, 1, 6, id="smallest"),
]
BACKENDS = cases("rope")
ALLOWED = {"fp32": 4.0, "bf16": 2.0}
"""Tolerance in roundings: two products and a sum, each rounded once (measured: 1)."""


def cos_and_sin(batch: int, tokens: int, size: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions that differ between rows and restart within a row, as in packed documents."""
    positions = torch.arange(batch * tokens).view(batch, tokens) % max(2, tokens - 1)
    half = positions[..., None] * 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.cat((half, half), dim=-1)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("batch", "tokens", "heads", "kv_heads", "size"), SHAPES)
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_backends_agree_with_the_reference(
    name: str, device: str, batch: int, tokens: int, heads: int, kv_heads: int, size: int, dtype: str
) -> None:
    rope = function_of("rope", name, device, dtype, size)
    fused = random(batch, tokens, heads + 2 * kv_heads, size, dtype=dtype, device=device)
    # The true result uses the same rounded table, since the op does not round the table.
    table = [part.to(fused.dtype) for part in cos_and_sin(batch, tokens, size)]
    # `* 1`: an op may overwrite its input, which autograd does not allow for a leaf.
    assert_within_roundings(
        lambda x: rope(x * 1, heads, kv_heads, *(part.to(device) for part in table)),
        lambda x: reference(x, heads, kv_heads, *(part.double() for part in table)),
        [fused],
        ALLOWED,
    )


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_a_non_contiguous_product_gives_the_same_result(name: str, device: str) -> None:
    rope = function_of("rope", name, device)
    wide = random(2, 7, 6, 64, dtype="fp32", device=device)
    table = [part.float() for part in cos_and_sin(2, 5, 32)]

    def of_a_part(function: Callable[..., tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, ...]:
        return function((x * 1)[:, 1:6, :, 32:], 4, 1, *(part.to(x) for part in table))

    assert_within_roundings(lambda x: of_a_part(rope, x), lambda x: of_a_part(reference, x), [wide], ALLOWED)


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_non_contiguous_gradients_give_the_same_result(name: str, device: str) -> None:
    """The gradient of a sum is an expanded scalar; that of attention is stored as [batch, heads, tokens, size]."""
    rope = function_of("rope", name, device)
    table = [part.float() for part in cos_and_sin(2, 5, 32)]

    def summed(function: Callable[..., tuple[Tensor, ...]], x: Tensor) -> Tensor:
        q, k, v = function(x * 1, 4, 1, *(part.to(x) for part in table))
        return q.sum() + k.contiguous().pow(2).sum() + v.sum()

    fused = random(2, 5, 6, 32, dtype="fp32", device=device)
    assert_within_roundings(lambda x: summed(rope, x), lambda x: summed(reference, x), [fused], {"fp32": 8.0})


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_v_and_the_table_are_not_modified(name: str, device: str, tokens: int) -> None:
    rope = function_of("rope", name, device)
    fused = random(1, tokens, 6, 32, dtype="fp32", device=device)
    before = fused.clone()
    table = [part.float().to(device) for part in cos_and_sin(1, tokens, 32)]
    table_before = [part.clone() for part in table]
    q, _, v = rope(fused, 4, 1, *table)
    assert torch.equal(v, before[:, :, 5:].transpose(1, 2))
    assert all(torch.equal(part, old) for part, old in zip(table, table_before, strict=True))
    assert tokens == 1 or not torch.equal(q, before[:, :, :4].transpose(1, 2))


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_position_zero_changes_nothing(name: str, device: str) -> None:
    rope = function_of("rope", name, device)
    fused = random(2, 3, 6, 32, dtype="fp32", device=device)
    before = fused.clone()
    cos, sin = torch.ones(2, 3, 32, device=device), torch.zeros(2, 3, 32, device=device)
    found = torch.cat(rope(fused, 4, 1, cos, sin), dim=1)
    assert torch.equal(found.transpose(1, 2), before)


def test_scores_depend_only_on_the_distance() -> None:
    """This is the purpose of rotary positions. In fp64, the tolerance only covers the rounding of cos and sin."""
    fused = torch.randn(1, 1, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def at(position: int) -> tuple[Tensor, Tensor]:
        half = position * 100.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
        angles = torch.cat((half, half))[None, None]
        return reference(fused, 1, 1, angles.cos(), angles.sin())[:2]

    def score(q_position: int, k_position: int) -> float:
        return (at(q_position)[0] * at(k_position)[1]).sum().item()

    assert score(9, 4) == pytest.approx(score(25, 20), abs=1e-12)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_nan_affects_only_its_rotated_pair(name: str, device: str) -> None:
    rope = function_of("rope", name, device)
    table = [part.float().to(device) for part in cos_and_sin(1, 2, 32)]
    for head in range(6):
        fused = random(1, 2, 6, 32, dtype="fp32", device=device)
        fused[0, 1, head, 3] = float("nan")
        found = torch.cat(rope(fused, 4, 1, *table), dim=1)
        # NaN is in both entries of the rotated pair of q or k, in v only in the entry itself, and nowhere else.
        assert found[0, head, 1].isnan().sum() == (1 if head == 5 else 2)
        assert found.isnan().sum() == (1 if head == 5 else 2)


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_nan_in_a_gradient_affects_only_its_rotated_pair(name: str, device: str) -> None:
    rope = function_of("rope", name, device)
    table = [part.float().to(device) for part in cos_and_sin(1, 2, 32)]
    fused = random(1, 2, 6, 32, dtype="fp32", device=device).requires_grad_()
    out = torch.cat(rope(fused * 1, 4, 1, *table), dim=1)
    way = torch.ones_like(out)
    way[0, 2, 1, 3] = float("nan")
    (out * way).sum().backward()
    assert fused.grad is not None
    assert fused.grad[0, 1, 2].isnan().sum() == 2
    assert fused.grad.isnan().sum() == 2


def test_gradients_are_the_derivatives() -> None:
    fused = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    table = cos_and_sin(2, 3, 4)
    assert torch.autograd.gradcheck(lambda x: reference(x, 2, 1, *table), (fused,))
