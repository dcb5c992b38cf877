"""The step of `AdamWBf16` on a GPU in one pass over weights, gradients and states.

A chain of torch kernels reads and writes every value a dozen times: 12 to 18 ms for 200 million values on an H200; one
pass takes 1 ms at memory bandwidth. Random bits come from Philox, a function of seed and position, so that a step can
be repeated bit by bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
MOST_PER_LAUNCH = 1 << 30
"""Positions are 32-bit numbers: Philox on 64 bits is several times slower."""


@triton.jit
def _rounded(x, noise):
    """Round fp32 to bf16 with 16 random bits (`rounding.round_stochastically`)."""
    bits = ((x.to(tl.int32, bitcast=True) + noise) & -65536).to(tl.float32, bitcast=True)
    return tl.where(x != x, x, bits).to(tl.bfloat16)


@triton.jit(do_not_specialize=["count", "seed"])
def _step(
    weight_ptr, gradient_ptr, moment_ptr, square_ptr, cut_off_ptr,
    count, seed, lr, beta1, beta2, eps, decay, correction1, correction2,
    KEEPS_CUT_OFF: tl.constexpr, ROUNDS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32)
    moment = tl.load(moment_ptr + place, mask=inside, other=0.0).to(tl.float32)
    square = tl.load(square_ptr + place, mask=inside, other=0.0).to(tl.float32)
    moment += (gradient - moment) * (1 - beta1)
    square = square * beta2 + gradient * gradient * (1 - beta2)
    noise, more_noise, _, _ = tl.randint4x(seed, place)
    tl.store(moment_ptr + place, _rounded(moment, noise.to(tl.int32, bitcast=True) & 65535), mask=inside)
    tl.store(square_ptr + place, _rounded(square, (noise.to(tl.int32, bitcast=True) >> 16) & 65535), mask=inside)
    stored = tl.load(weight_ptr + place, mask=inside, other=0.0)
    master = stored.to(tl.float32)
    if KEEPS_CUT_OFF:
        cut_off = tl.load(cut_off_ptr + place, mask=inside, other=0).to(tl.int32)
        master = (master.to(tl.int32, bitcast=True) + cut_off).to(tl.float32, bitcast=True)
    denominator = tl.sqrt(square) / correction2 + eps
    master -= lr / correction1 * moment / denominator + lr * decay * master
    if KEEPS_CUT_OFF:
        bits = master.to(tl.int32, bitcast=True)
        upper = (bits + 32768) & -65536
        is_nan = master != master
        tl.store(cut_off_ptr + place, tl.where(is_nan, 0, bits - upper).to(tl.int16), mask=inside)
        nearest = tl.where(is_nan, master, upper.to(tl.float32, bitcast=True))
        tl.store(weight_ptr + place, nearest.to(tl.bfloat16), mask=inside)
    elif ROUNDS_WEIGHT:
        rounded = _rounded(master, more_noise.to(tl.int32, bitcast=True) & 65535)
        tl.store(weight_ptr + place, rounded, mask=inside)
    else:
        tl.store(weight_ptr + place, master, mask=inside)


def step(
    weight: Tensor,
    gradient: Tensor,
    moment: Tensor,
    square: Tensor,
    cut_off: Tensor | None,
    step_number: int,
    group: dict[str, Any],
    seed: int,
) -> None:
    """Take a step. Tensors are flat and of equal length, at most MOST_PER_LAUNCH; `cut_off`: for bf16 with kahan."""
    count, betas = weight.numel(), group["betas"]
    assert 0 < count <= MOST_PER_LAUNCH and all(x.is_contiguous() for x in (weight, gradient, moment, square))
    _step[(triton.cdiv(count, BLOCK),)](
        *(weight, gradient, moment, square, weight if cut_off is None else cut_off),
        *(count, seed, group["lr"], *betas, group["eps"], group["weight_decay"]),
        *(1 - betas[0] ** step_number, (1 - betas[1] ** step_number) ** 0.5),
        KEEPS_CUT_OFF=cut_off is not None,
        ROUNDS_WEIGHT=weight.dtype == torch.bfloat16,
        BLOCK=BLOCK,
    )
