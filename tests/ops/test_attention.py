"""Attention: every backend compared with the reference, for every kind of visibility."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.ops.comparing import DTYPES, assert_within_roundings, cases, function_of, random
from z2all_ds.ops.attention import eager, flex
from z2all_ds.ops.visibility import Visible, document_borders

pytestmark = [
    # Some CPUs have no bf16 matrix products; torch warns once and falls back.
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

SHAPES = [
    # batch, heads, kv heads, tokens, head size
    pytest.param(1, 4, 4, 1, 64, id="one-token"),
    pytest.param(2, 4, 2, 5, 64, id="grouped"),
    pytest.param(1, 3, 1, 7, 96, id="one-kv-head"),
    pytest.param(2, 4, 4, 33, 32, id="equal-heads"),
]
BACKENDS = cases("attention")
ALLOWED = {"fp32": 64.0, "bf16": 4.0}
"""Tolerance in roundings. fp32: up to 96 products are summed in a different order, and the gradient of softmax is a
difference of two such sums of size 10 and more (with one token it cancels to 0; measured: 5 on CPUs, 22 on an H200).
bf16: inner sums are fp32, and only scores, weights and results are rounded (measured: 1). A wrong mask or scale is off
by 10^5 in fp32 and by 100 in bf16."""
HEAD_DIM = 64
SCALE = HEAD_DIM**-0.5
PACKED = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1]])
LONG_LENGTHS = [[1, 127, 130, 42], [299, 1]]
"""Lengths of documents that begin and end inside a kernel's blocks or at their borders; some have a single token."""


@pytest.fixture(autouse=True)
def compile_for_every_shape() -> Iterator[None]:
    """Let torch compile flex for each new shape; after eight it would log a warning and stop using the kernel."""
    if not torch.cuda.is_available():
        yield
        return
    from torch._dynamo import config

    with config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        yield


def packed_by_borders(device: torch.device) -> Visible:
    # Three empty documents at the end, as a captured CUDA graph needs them.
    borders = document_borders(PACKED, multiple=8).to(device)
    return Visible(2, 8, device, cu_seqlens=borders, max_document=7)


def padded(device: torch.device) -> Visible:
    real = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    return Visible(2, 8, device, padding=real.to(device))


KINDS = {
    "documents": lambda device: Visible(2, 8, device, document_ids=PACKED.to(device)),
    "borders": packed_by_borders,
    "padding": padded,
    "cached-keys": lambda device: Visible(2, 3, device, seen=5),
    "cached-keys-one-query": lambda device: Visible(2, 1, device, seen=7),
}


def heads(batch: int, tokens: int, *counts: int, size: int = HEAD_DIM, dtype: str, device: str) -> list[Tensor]:
    """Return contiguous tensors of shape [batch, heads, tokens, size]."""
    return [
        random(batch, count, tokens, size, dtype=dtype, device=device, seed=seed) for seed, count in enumerate(counts)
    ]


def plain(q: Tensor) -> Visible:
    return Visible(q.shape[0], q.shape[2], q.device)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("batch", "heads_q", "heads_kv", "tokens", "size"), SHAPES)
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_causal_attention_agrees_with_the_reference(
    name: str, device: str, batch: int, heads_q: int, heads_kv: int, tokens: int, size: int, dtype: str
) -> None:
    attention = function_of("attention", name, device, dtype, size)
    assert_within_roundings(
        lambda q, k, v: attention(q, k, v, plain(q), size**-0.5),
        lambda q, k, v: eager(q, k, v, plain(q), size**-0.5),
        heads(batch, tokens, heads_q, heads_kv, heads_kv, size=size, dtype=dtype, device=device),
        ALLOWED,
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_every_kind_of_visibility_agrees_with_the_reference(name: str, device: str, kind: str, dtype: str) -> None:
    attention = function_of("attention", name, device, dtype)
    here, there = KINDS[kind](torch.device(device)), KINDS[kind](torch.device("cpu"))
    leaves = heads(2, here.tokens, 4, dtype=dtype, device=device)
    leaves += heads(2, here.seen + here.tokens, 2, 2, dtype=dtype, device=device)
    assert_within_roundings(
        lambda q, k, v: attention(q, k, v, here, SCALE), lambda q, k, v: eager(q, k, v, there, SCALE), leaves, ALLOWED
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("packed", [True, False], ids=["documents", "plain"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_views_of_one_fused_product_give_the_same_result(name: str, device: str, packed: bool, dtype: str) -> None:
    """The model passes [batch, heads, tokens, size] views of [batch, tokens, all heads, size]."""
    attention = function_of("attention", name, device, dtype)
    fused = random(2, 8, 8, HEAD_DIM, dtype=dtype, device=device)

    def of_fused(function: object, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in x.split([4, 2, 2], dim=2))
        visible = Visible(2, 8, x.device, document_ids=PACKED.to(x.device) if packed else None)
        assert callable(function)
        out: Tensor = function(q, k, v, visible, SCALE)
        return out

    assert_within_roundings(lambda x: of_fused(attention, x), lambda x: of_fused(eager, x), [fused], ALLOWED)


def each_document_alone(q: Tensor, k: Tensor, v: Tensor, lengths: list[list[int]]) -> Tensor:
    rows = []
    for row, row_lengths in enumerate(lengths):
        parts = [[part[None] for part in x[row].split(row_lengths, dim=1)] for x in (q, k, v)]
        rows.append(torch.cat([eager(*qkv, plain(qkv[0]), SCALE) for qkv in zip(*parts, strict=True)], dim=2))
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("given_as", ["ids", "borders"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_packed_documents_give_the_same_results_as_single_ones(
    name: str, device: str, given_as: str, dtype: str
) -> None:
    attention = function_of("attention", name, device, dtype)
    ids = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in LONG_LENGTHS]).to(device)
    borders = document_borders(ids, multiple=8)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visible = Visible(2, 300, q.device, document_ids=ids)
        if given_as == "borders":
            visible = Visible(2, 300, q.device, cu_seqlens=borders, max_document=299)
        out: Tensor = attention(q, k, v, visible, SCALE)
        return out

    assert_within_roundings(
        packed,
        lambda q, k, v: each_document_alone(q, k, v, LONG_LENGTHS),
        heads(2, 300, 2, 1, 1, dtype=dtype, device=device),
        ALLOWED,
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_masked_keys_and_values_have_no_influence(name: str, device: str, dtype: str) -> None:
    attention = function_of("attention", name, device, dtype)
    q, k, v = heads(2, 8, 4, 2, 2, dtype=dtype, device=device)
    visible = Visible(2, 8, q.device, document_ids=PACKED.to(device))
    before = attention(q, k, v, visible, 1.0)
    # In row 0, the last document (positions 5 to 7) gets different keys and values.
    k[0, :, 5:], v[0, :, 5:] = 7.0, -9.0
    after = attention(q, k, v, visible, 1.0)
    assert torch.equal(before[0, :, :5], after[0, :, :5])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0, :, 5:], after[0, :, 5:])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_forward_and_backward_do_not_modify_the_inputs(name: str, device: str, dtype: str) -> None:
    attention = function_of("attention", name, device, dtype)
    leaves = [x.requires_grad_() for x in heads(2, 8, 4, 2, 2, dtype=dtype, device=device)]
    before = [x.detach().clone() for x in leaves]
    attention(*leaves, plain(leaves[0]), SCALE).float().pow(2).sum().backward()
    assert all(torch.equal(x, old) for x, old in zip(leaves, before, strict=True))
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in leaves)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "documents"])
@pytest.mark.parametrize("poisoned", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_nan_in_an_input_reaches_the_result_of_its_head_only(
    name: str, device: str, poisoned: int, packed: bool, dtype: str
) -> None:
    attention = function_of("attention", name, device, dtype)
    # 40 keys: with fewer keys than a vector register holds, torch's CPU kernel (2.11, AVX-512) returns 0 for a NaN
    # query, see pytorch/pytorch#141128.
    inputs = heads(1, 40, 2, 2, 2, dtype=dtype, device=device)
    inputs[poisoned][0, 1, 39, 5] = float("nan")
    documents = (torch.arange(40, device=device) // 20)[None] if packed else None
    out = attention(*inputs, Visible(1, 40, inputs[0].device, document_ids=documents), 1.0)
    assert out[0, 1, 39].isnan().any()
    assert out[0, 0].isfinite().all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_nan_in_a_gradient_reaches_the_gradients_of_its_head_only(name: str, device: str, dtype: str) -> None:
    attention = function_of("attention", name, device, dtype)
    q, k, v = (x.requires_grad_() for x in heads(1, 40, 2, 2, 2, dtype=dtype, device=device))
    out = attention(q, k, v, plain(q), 1.0)
    way = torch.ones_like(out)
    way[0, 1, 39, 5] = float("nan")
    (out * way).sum().backward()
    for x in (q, k, v):
        assert x.grad[0, 1].isnan().any()
        assert x.grad[0, 0].isfinite().all()


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_gradients_are_the_derivatives(name: str) -> None:
    attention = function_of("attention", name, "cpu")
    q = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    k, v = (x.detach()[:, :1].clone().mul_(0.7).requires_grad_() for x in (q, q.flip(2)))
    packed = Visible(1, 4, q.device, document_ids=torch.tensor([[0, 1, 1, 2]]))
    assert torch.autograd.gradcheck(lambda *qkv: attention(*qkv, plain(q), 0.5), (q, k, v))
    assert torch.autograd.gradcheck(lambda *qkv: attention(*qkv, packed, 0.5), (q, k, v))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "documents"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_dropout_keeps_the_mean(name: str, device: str, packed: bool, dtype: str) -> None:
    attention = function_of("attention", name, device, dtype)
    torch.manual_seed(0)
    q = k = torch.zeros(2, 4, 64, HEAD_DIM, device=device, dtype=DTYPES[dtype])
    v = torch.ones_like(q)
    documents = torch.zeros(2, 64, dtype=torch.int32, device=device) if packed else None
    visible = Visible(2, 64, q.device, document_ids=documents)
    out = attention(q, k, v, visible, 1.0, 0.5)
    assert not torch.equal(out, v)
    # 512 queries; query t averages t + 1 values of 0 or 2, so the mean has deviation 0.012; 0.06 is five times that.
    assert abs(out[..., 0].float().mean().item() - 1) < 0.06
    without = attention(q, k, v, visible, 1.0, 0.0)
    # Up to 64 weights are rounded and summed.
    assert (without - v).abs().max() <= 8 * torch.finfo(DTYPES[dtype]).eps


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "documents"])
def test_uncompiled_flex_agrees_with_the_reference(packed: bool) -> None:
    """On a CPU, flex has no backward pass and is refused for training, but its block mask can be tested there."""
    q, k, v = heads(2, 8, 4, 2, 2, dtype="fp32", device="cpu")
    visible = Visible(2, 8, q.device, document_ids=PACKED if packed else None)
    found, wanted = flex(q, k, v, visible, SCALE), eager(q, k, v, visible, SCALE)
    # Both compute the formula with softmax in fp32; sums of 64 products may be in a different order.
    assert (found - wanted).abs().max() <= 16 * torch.finfo(torch.float32).eps
