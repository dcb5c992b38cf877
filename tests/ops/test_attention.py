"""Attention: every backend against the reference, under every kind of mask."""

import pytest
import torch
from torch import Tensor

from tests.ops.comparing import assert_within_roundings, cases, function_of, random
from z2all_ds.ops.attention import eager

# Some CPUs have no bf16 products; torch says so once and takes another way.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

SHAPES = [
    # batch, heads, kv heads, tokens, head size
    pytest.param(1, 4, 4, 1, 32, id="one-token"),
    pytest.param(2, 4, 2, 5, 64, id="grouped"),
    pytest.param(1, 3, 1, 7, 96, id="one-kv-head"),
    pytest.param(2, 4, 4, 33, 32, id="equal-heads"),
]
BACKENDS = cases("attention")
ALLOWED = {"fp32": 64.0, "bf16": 4.0}
"""Roundings. fp32: sums of up to 96 products round in another order, and what softmax passes back is a difference of
two such sums of size 10 and more (with one token it cancels to 0; seen: 5 on CPUs, 22 on an H200). bf16: inner sums are
fp32, and only scores, weights and results are rounded (seen: 1). A wrong mask or scale is off by 10^5 and by 100."""


def causal(tokens: int, keys: int) -> Tensor:
    """The last `tokens` of `keys` positions ask."""
    return (torch.arange(keys)[None, :] <= torch.arange(keys - tokens, keys)[:, None])[None, None]


def document_mask() -> Tensor:
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1]])
    return causal(8, 8) & (documents[:, None, :, None] == documents[:, None, None, :])


def padding_mask() -> Tensor:
    real = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    return (causal(8, 8) & real[:, None, None, :]) | torch.eye(8, dtype=torch.bool)


def cached_mask() -> Tensor:
    return causal(3, 8).expand(2, 1, 3, 8)


MASKS = {"documents": document_mask(), "padding": padding_mask(), "cached-keys": cached_mask()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "tokens", "size"), SHAPES)
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_causal(
    name: str, device: str, batch: int, heads: int, kv_heads: int, tokens: int, size: int, dtype: str
) -> None:
    attention = function_of("attention", name, device, dtype)
    leaves = [
        random(batch, count, tokens, size, dtype=dtype, device=device, seed=seed)
        for seed, count in enumerate((heads, kv_heads, kv_heads))
    ]
    assert_within_roundings(
        lambda q, k, v: attention(q, k, v, None, size**-0.5),
        lambda q, k, v: eager(q, k, v, None, size**-0.5),
        leaves,
        ALLOWED,
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_masked(name: str, device: str, kind: str, dtype: str) -> None:
    attention = function_of("attention", name, device, dtype)
    mask = MASKS[kind]
    queries, keys = mask.shape[-2:]
    leaves = [random(2, 4, queries, 32, dtype=dtype, device=device, seed=1)]
    leaves += [random(2, 2, keys, 32, dtype=dtype, device=device, seed=seed) for seed in (2, 3)]
    assert_within_roundings(
        lambda q, k, v: attention(q, k, v, mask.to(device), 32**-0.5),
        lambda q, k, v: eager(q, k, v, mask, 32**-0.5),
        leaves,
        ALLOWED,
    )


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_what_is_masked_has_no_influence_at_all(name: str, device: str) -> None:
    attention = function_of("attention", name, device)
    q = random(2, 4, 8, 32, dtype="fp32", device=device, seed=1)
    k, v = (random(2, 2, 8, 32, dtype="fp32", device=device, seed=seed) for seed in (2, 3))
    mask = document_mask().to(device)
    before = attention(q, k, v, mask, 1.0)
    # In row 0, the last document (positions 5 to 7) gets other keys and values.
    k[0, :, 5:], v[0, :, 5:] = 7.0, -9.0
    after = attention(q, k, v, mask, 1.0)
    assert isinstance(before, Tensor)
    assert isinstance(after, Tensor)
    assert torch.equal(before[0, :, :5], after[0, :, :5])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0, :, 5:], after[0, :, 5:])


@pytest.mark.parametrize("poisoned", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_nan_shows(name: str, device: str, poisoned: int) -> None:
    attention = function_of("attention", name, device)
    # 40 keys: with fewer than a vector register holds, torch's CPU kernel (2.11, AVX-512) gives 0 for a query of NaN,
    # pytorch/pytorch#141128.
    inputs = [random(1, 2, 40, 32, dtype="fp32", device=device, seed=seed) for seed in range(3)]
    inputs[poisoned][0, 1, 39, 5] = float("nan")
    out = attention(*inputs, None, 1.0)
    assert isinstance(out, Tensor)
    assert out[0, 1, 39].isnan().any()
    assert out[0, 0].isfinite().all()


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_gradients_are_the_derivatives(name: str) -> None:
    attention = function_of("attention", name, "cpu")
    mask = document_mask()[:1, :, 2:6, 2:6]
    q = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    k, v = (x.detach()[:, :1].clone().mul_(0.7).requires_grad_() for x in (q, q.flip(2)))
    assert torch.autograd.gradcheck(lambda *qkv: attention(*qkv, None, 0.5), (q, k, v))
    assert torch.autograd.gradcheck(lambda *qkv: attention(*qkv, mask, 0.5), (q, k, v))


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_dropout_keeps_the_mean(name: str, device: str) -> None:
    attention = function_of("attention", name, device)
    torch.manual_seed(0)
    q = k = torch.zeros(2, 4, 64, 32, device=device)
    v = torch.ones(2, 4, 64, 32, device=device)
    out = attention(q, k, v, None, 1.0, 0.5)
    assert isinstance(out, Tensor)
    assert not torch.equal(out, v)
    # 512 queries; query t averages t + 1 values of 0 or 2, so the mean's deviation is 0.012; 0.06 is five of them.
    assert abs(out[..., 0].mean().item() - 1) < 0.06
    without = attention(q, k, v, None, 1.0, 0.0)
    assert isinstance(without, Tensor)
    # 64 weights of 1/64 and fewer that are rounded and summed.
    assert (without - v).abs().max() < 1e-6
