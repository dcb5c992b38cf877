"""Rotary positions on the queries and keys of one fused product, halves rotated as in Llama.

Contract: `rope(heads, num_heads, num_kv_heads, cos, sin) -> (q, k, v)` with heads [batch, tokens, q heads | k heads |
v heads, head size], cos and sin [batch, tokens, head size] whose halves are equal; results [batch, heads, tokens, head
size]. v is not rotated: it is part of the contract because the split can be done in the same pass.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from z2all_ds.ops.registry import backend, needs_library


class _SplitAndTurn(Function):
    """Triton kernel; the backward pass rotates the three gradients and merges them into one fused gradient."""

    @staticmethod
    def forward(
        ctx: Any, heads_BTHE: Tensor, num_heads: int, num_kv_heads: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, ...]:
        from z2all_ds.ops.kernels import rope as kernel

        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return tuple(kernel.split(heads_BTHE.contiguous(), num_heads, num_kv_heads, cos, sin))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from z2all_ds.ops.kernels import rope as kernel

        dq, dk, dv = (g if g.stride(-1) == 1 else g.contiguous() for g in gradients)
        return kernel.merge(dq, dk, dv, *ctx.saved_tensors), None, None, None, None


@backend("rope", "triton", needs_library("triton", "triton"))
def triton(
    heads_BTHE: Tensor, num_heads: int, num_kv_heads: int, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """This package's kernel: one pass forward, one backward."""
    q, k, v = (part.transpose(1, 2) for part in _SplitAndTurn.apply(heads_BTHE, num_heads, num_kv_heads, cos, sin))
    return q, k, v


@backend("rope", "liger", needs_library("liger_kernel.ops.rope", "liger-kernel"))
def liger(
    heads_BTHE: Tensor, num_heads: int, num_kv_heads: int, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Liger's Triton kernel for q and k."""
    from liger_kernel.ops.rope import LigerRopeFunction

    q, k, v = split_heads(heads_BTHE, num_heads, num_kv_heads)
    # The kernel overwrites an input with memory layout [batch, tokens, heads, head size], and otherwise a copy (q and k
    # as parts of one fused product, except for a single token). Always copying here costs the same and never changes
    # the caller's tensors.
    q, k = LigerRopeFunction.apply(_own_copy(q), _own_copy(k), cos, sin)
    return q, k, v


def _own_copy(x_BHTE: Tensor) -> Tensor:
    return x_BHTE.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


class _FlashTurn(Function):
    """flash-attn's kernel on [1, tokens, heads, head size]; the backward pass uses its `conjugate`."""

    @staticmethod
    def forward(ctx: Any, x_1NHE: Tensor, cos_NE: Tensor, sin_NE: Tensor) -> Tensor:
        from flash_attn.ops.triton.rotary import apply_rotary

        ctx.save_for_backward(cos_NE, sin_NE)
        turned: Tensor = apply_rotary(x_1NHE, cos_NE, sin_NE)
        return turned

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from flash_attn.ops.triton.rotary import apply_rotary

        return apply_rotary(gradients[0], *ctx.saved_tensors, conjugate=True), None, None


@backend("rope", "flash_attn", needs_library("flash_attn.ops.triton.rotary", "flash-attn"))
def flash_attn(
    heads_BTHE: Tensor, num_heads: int, num_kv_heads: int, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """flash-attn's Triton kernel for q and k at once."""
    batch, tokens, _, size = heads_BTHE.shape
    # Its table has a row per position of a sequence, but here positions restart with each document: so the whole batch
    # is passed as one sequence, and row i of the table belongs to token i.
    tables = [table.reshape(-1, size)[:, : size // 2].contiguous() for table in (cos, sin)]
    q_and_k = heads_BTHE.reshape(1, batch * tokens, -1, size)[:, :, : num_heads + num_kv_heads]
    turned_BTHE: Tensor = _FlashTurn.apply(q_and_k, *tables).view(batch, tokens, -1, size)
    q, k = (part.transpose(1, 2) for part in turned_BTHE.split([num_heads, num_kv_heads], dim=2))
    return q, k, heads_BTHE[:, :, num_heads + num_kv_heads :].transpose(1, 2)


@backend("rope", "torch")
def reference(
    heads_BTHE: Tensor, num_heads: int, num_kv_heads: int, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference."""
    q, k, v = split_heads(heads_BTHE, num_heads, num_kv_heads)
    cos_B1TE, sin_B1TE = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos_B1TE + _rotate_half(q) * sin_B1TE, k * cos_B1TE + _rotate_half(k) * sin_B1TE, v


def split_heads(heads_BTHE: Tensor, num_heads: int, num_kv_heads: int) -> list[Tensor]:
    """Return q, k and v as views [batch, heads, tokens, head size]."""
    return [part.transpose(1, 2) for part in heads_BTHE.split([num_heads, num_kv_heads, num_kv_heads], dim=2)]


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
