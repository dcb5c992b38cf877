"""Rotary positions on queries and keys, [batch, heads, tokens, head size], halves rotated as in Llama.

Contract: `rope(q, k, cos, sin)` with cos and sin [batch, tokens, head size]; returns rotated q and k.
"""

import torch
from torch import Tensor

from z2all_ds.ops.registry import backend, needs_library


@backend("rope", "liger", needs_library("liger_kernel.ops.rope", "liger-kernel"))
def liger(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """One Triton kernel for both."""
    from liger_kernel.ops.rope import LigerRopeFunction

    # The kernel writes over its input where that lies in memory as [batch, tokens, heads, head size], and over a copy
    # where it does not (q and k as parts of one fused product, but for a single token). Always a copy made here: the
    # same cost, and the caller's tensors stay what they were.
    rotated: tuple[Tensor, Tensor] = LigerRopeFunction.apply(_own_copy(q), _own_copy(k), cos, sin)
    return rotated


def _own_copy(x_BHTE: Tensor) -> Tensor:
    return x_BHTE.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


@backend("rope", "torch")
def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The reference."""
    cos_B1TD, sin_B1TD = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos_B1TD + _rotate_half(q) * sin_B1TD, k * cos_B1TD + _rotate_half(k) * sin_B1TD


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
