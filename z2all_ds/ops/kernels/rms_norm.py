"""RMSNorm with the residual sum before it, forward and backward, each in one pass over the rows.

Memory traffic dominates: the forward pass reads x and the residual and writes their sum and its norm; the backward pass
reads the sum and two gradients and writes one. Each program sums the weight's gradient over its own rows; a second step
adds these sums, always in the same order, so that a step can be repeated bit by bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROW_PROGRAMS_PER_SM = 4
"""On an H200, 16,384 rows of 2048 in bf16: 76 us with 4, 107 with 2, 76 with 8."""
FOLD_COLUMNS, FOLD_ROWS = 32, 64


@triton.jit
def _forward(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, stream_ptr, rstd_ptr, width, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    place = row * width + columns
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(stream_ptr + place, x, mask=inside)
        # Later layers read the rounded sum, so the norm uses it too.
        x = x.to(stream_ptr.dtype.element_ty).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    normed = (x * rstd).to(weight_ptr.dtype.element_ty) * weight
    tl.store(normed_ptr + place, normed, mask=inside)


@triton.jit
def _backward(
    stream_ptr, weight_ptr, rstd_ptr, d_normed_ptr, d_stream_ptr, dx_ptr, d_weight_ptr, rows, width,
    HAS_D_STREAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    d_weight = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, programs):
        place = row * width + columns
        rstd = tl.load(rstd_ptr + row)
        unit = tl.load(stream_ptr + place, mask=inside, other=0.0).to(tl.float32) * rstd
        d_normed = tl.load(d_normed_ptr + place, mask=inside, other=0.0).to(tl.float32)
        d_weight += d_normed * unit.to(weight_ptr.dtype.element_ty).to(tl.float32)
        d_unit = d_normed * weight.to(tl.float32)
        dx = (d_unit - unit * (tl.sum(unit * d_unit, axis=0) / width)) * rstd
        if HAS_D_STREAM:
            dx += tl.load(d_stream_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + place, dx, mask=inside)
    tl.store(d_weight_ptr + program * width + columns, d_weight, mask=inside)


@triton.jit
def _fold(
    partial_ptr, target_ptr, rows, width, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sum the rows of `partial`, always in the same order, and write to `target` or add to it."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, rows, ROWS):
        here = first + tl.arange(0, ROWS)
        place = here[:, None] * width + columns[None, :]
        total += tl.load(partial_ptr + place, mask=(here < rows)[:, None] & inside[None, :], other=0.0)
    folded = tl.sum(total, axis=0)
    if ADD:
        folded += tl.load(target_ptr + columns, mask=inside, other=0.0)
    tl.store(target_ptr + columns, folded, mask=inside)


def forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (normed, stream, rstd) for contiguous x and residual [..., width]."""
    width = x.shape[-1]
    rows = x.numel() // width
    stream = x if residual is None else torch.empty_like(residual)
    normed = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _forward[(rows,)](
        x, x if residual is None else residual, weight, normed, stream, rstd, width, eps,
        HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return normed, stream, rstd


def backward(
    stream: Tensor, weight: Tensor, rstd: Tensor, d_normed: Tensor, d_stream: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return (gradient of the stream in its dtype, gradient of the weight in fp32 or None if added to the sink)."""
    width = stream.shape[-1]
    rows = stream.numel() // width
    dx = torch.empty_like(stream)
    processors = torch.cuda.get_device_properties(stream.device).multi_processor_count
    programs = min(rows, ROW_PROGRAMS_PER_SM * processors)
    partial = torch.empty(programs, width, dtype=torch.float32, device=stream.device)
    block = triton.next_power_of_2(width)
    _backward[(programs,)](
        stream, weight, rstd, d_normed, dx if d_stream is None else d_stream, dx, partial, rows, width,
        HAS_D_STREAM=d_stream is not None, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    d_weight = torch.empty(width, dtype=torch.float32, device=stream.device) if sink is None else sink
    _fold[(triton.cdiv(width, FOLD_COLUMNS),)](
        partial, d_weight, programs, width, ADD=sink is not None, ROWS=FOLD_ROWS, COLUMNS=FOLD_COLUMNS, num_warps=8
    )
    return dx, d_weight if sink is None else None


def _warps(block: int) -> int:
    """Return the number of warps; 8 elements per thread keep loads 16 bytes wide."""
    return max(1, min(16, block // 256))
