"""Rotary positions on the q and k heads of one fused product: split into q, k and v in one pass, and merge in one.

In both directions one program rotates one token: it reads cos and sin once and iterates over the heads in tiles.
"""

import triton
import triton.language as tl
from torch import Tensor

SPLIT_TILE, MERGE_TILE, WARPS = 8, 16, 2
"""Heads per tile. On an H200, 32 + 8 heads of 64: split 54 us with 8 (68 with 16), merge 54 us with 16 (90 with 8)."""


@triton.jit
def _turn(
    from_ptr, to_ptr, from_stride, to_stride, cos, sin, half, heads,
    SIGN: tl.constexpr, TURN: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotate or copy `heads` heads of one token, from rows `from_stride` apart to rows `to_stride` apart."""
    lanes = tl.arange(0, HALF)
    for first in range(0, heads, TILE):
        rows = first + tl.arange(0, TILE)
        inside = (rows < heads)[:, None] & (lanes < half)[None, :]
        source = from_ptr + rows[:, None] * from_stride + lanes[None, :]
        target = to_ptr + rows[:, None] * to_stride + lanes[None, :]
        a = tl.load(source, mask=inside, other=0.0)
        b = tl.load(source + half, mask=inside, other=0.0)
        if TURN:
            a32, b32 = a.to(tl.float32), b.to(tl.float32)
            a = a32 * cos[None, :] - SIGN * b32 * sin[None, :]
            b = b32 * cos[None, :] + SIGN * a32 * sin[None, :]
        tl.store(target, a, mask=inside)
        tl.store(target + half, b, mask=inside)


@triton.jit
def _split(
    heads_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, num_heads, num_kv_heads, half,
    TILE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    size = 2 * half
    lanes = tl.arange(0, HALF)
    cos = tl.load(cos_ptr + token * size + lanes, mask=lanes < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * size + lanes, mask=lanes < half, other=0.0).to(tl.float32)
    fused = heads_ptr + token * (num_heads + 2 * num_kv_heads) * size
    q, k, v = q_ptr + token * num_heads * size, k_ptr + token * num_kv_heads * size, v_ptr + token * num_kv_heads * size
    _turn(fused, q, size, size, cos, sin, half, num_heads, 1.0, True, TILE, HALF)
    _turn(fused + num_heads * size, k, size, size, cos, sin, half, num_kv_heads, 1.0, True, TILE, HALF)
    values = fused + (num_heads + num_kv_heads) * size
    _turn(values, v, size, size, cos, sin, half, num_kv_heads, 1.0, False, TILE, HALF)


@triton.jit
def _merge(
    dq_ptr, dk_ptr, dv_ptr, d_heads_ptr, cos_ptr, sin_ptr, tokens, num_heads, num_kv_heads, half,
    dq_b, dq_h, dq_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    TILE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, column = token // tokens, token % tokens
    size = 2 * half
    lanes = tl.arange(0, HALF)
    cos = tl.load(cos_ptr + token * size + lanes, mask=lanes < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * size + lanes, mask=lanes < half, other=0.0).to(tl.float32)
    fused = d_heads_ptr + token * (num_heads + 2 * num_kv_heads) * size
    dq, dk, dv = (
        dq_ptr + row * dq_b + column * dq_t,
        dk_ptr + row * dk_b + column * dk_t,
        dv_ptr + row * dv_b + column * dv_t,
    )
    _turn(dq, fused, dq_h, size, cos, sin, half, num_heads, -1.0, True, TILE, HALF)
    _turn(dk, fused + num_heads * size, dk_h, size, cos, sin, half, num_kv_heads, -1.0, True, TILE, HALF)
    values = fused + (num_heads + num_kv_heads) * size
    _turn(dv, values, dv_h, size, cos, sin, half, num_kv_heads, -1.0, False, TILE, HALF)


def split(heads_BTHE: Tensor, num_heads: int, num_kv_heads: int, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Return rotated q and k, and v, each contiguous [B, T, heads, E], from the contiguous fused product."""
    batch, tokens, _, size = heads_BTHE.shape
    parts = [heads_BTHE.new_empty(batch, tokens, count, size) for count in (num_heads, num_kv_heads, num_kv_heads)]
    half = size // 2
    _split[(batch * tokens,)](
        heads_BTHE, *parts, cos, sin, num_heads, num_kv_heads, half,
        TILE=SPLIT_TILE, HALF=triton.next_power_of_2(half), num_warps=WARPS,
    )  # fmt: skip
    return parts


def merge(dq_BTHE: Tensor, dk_BTHE: Tensor, dv_BTHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient of the fused product from those of q, k and v; only their last dimension is contiguous."""
    batch, tokens, num_heads, size = dq_BTHE.shape
    num_kv_heads = dk_BTHE.shape[2]
    d_heads = dq_BTHE.new_empty(batch, tokens, num_heads + 2 * num_kv_heads, size)
    strides = [grad.stride(axis) for grad in (dq_BTHE, dk_BTHE, dv_BTHE) for axis in (0, 2, 1)]
    half = size // 2
    _merge[(batch * tokens,)](
        dq_BTHE, dk_BTHE, dv_BTHE, d_heads, cos, sin, tokens, num_heads, num_kv_heads, half, *strides,
        TILE=MERGE_TILE, HALF=triton.next_power_of_2(half), num_warps=WARPS,
    )  # fmt: skip
    return d_heads
