"""Cast of bf16 to fp8 with one scale per tensor, plain and transposed, for 8-bit tensor core products.

Hopper multiplies fp8 only if both factors are contiguous along the summed dimension; the three products of a linear
layer need different layouts, so the cast writes both from one read. The scale comes from the tensor's own largest entry
(no history, nothing to keep in a checkpoint): a first pass writes one maximum per program, and the cast programs take
the largest of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

AMAX_PROGRAMS, AMAX_BLOCK = 1024, 4096
TILE_ROWS, TILE_COLUMNS, CAST_WARPS = 64, 128, 4


@triton.jit
def _partial_maxima(x_ptr, maxima_ptr, count, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in range(program * BLOCK, count, programs * BLOCK):
        places = first + tl.arange(0, BLOCK)
        x = tl.abs(tl.load(x_ptr + places, mask=places < count, other=0.0).to(tl.float32))
        # NaN must propagate, or it would be cast to a number.
        largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
    top = tl.max(largest, axis=0)
    has_nan = tl.max((largest != largest).to(tl.int32), axis=0)
    tl.store(maxima_ptr + program, tl.where(has_nan > 0, float("nan"), top))


@triton.jit
def _cast(
    x_ptr, maxima_ptr, as_is_ptr, transposed_ptr, inverse_scale_ptr, rows, columns, limit,
    AS_IS: tl.constexpr, TRANSPOSED: tl.constexpr,
    MAXIMA: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    maxima = tl.load(maxima_ptr + tl.arange(0, MAXIMA))
    has_nan = tl.max((maxima != maxima).to(tl.int32), axis=0)
    largest = tl.max(maxima, axis=0)
    inverse_scale = tl.where(largest > 0.0, largest / limit, 1.0)
    inverse_scale = tl.where(has_nan > 0, float("nan"), inverse_scale)
    first_row, first_column = tl.program_id(0), tl.program_id(1)
    if (first_row == 0) & (first_column == 0):
        tl.store(inverse_scale_ptr, inverse_scale)
    row = (first_row * TILE_R + tl.arange(0, TILE_R)).to(tl.int64)
    column = (first_column * TILE_C + tl.arange(0, TILE_C)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    small = tl.clamp(x / inverse_scale, -limit, limit).to(as_is_ptr.dtype.element_ty)
    if AS_IS:
        tl.store(as_is_ptr + row[:, None] * columns + column[None, :], small, mask=inside)
    if TRANSPOSED:
        tl.store(transposed_ptr + column[:, None] * rows + row[None, :], tl.trans(small), mask=tl.trans(inside))


def largest_entries(x_RC: Tensor) -> Tensor:
    """Return the largest absolute value of each program's part of x; the largest of all gives the scale."""
    maxima = torch.empty(AMAX_PROGRAMS, dtype=torch.float32, device=x_RC.device)
    _partial_maxima[(AMAX_PROGRAMS,)](x_RC, maxima, x_RC.numel(), BLOCK=AMAX_BLOCK, num_warps=8)
    return maxima


def cast(
    x_RC: Tensor, dtype: torch.dtype, maxima: Tensor, as_is: bool = True, transposed: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x in fp8 [R, C], its transpose [C, R], the fp32 factor that restores x).

    Layouts not requested are empty.
    """
    rows, columns = x_RC.shape
    straight = torch.empty((rows, columns) if as_is else (0,), dtype=dtype, device=x_RC.device)
    turned = torch.empty((columns, rows) if transposed else (0,), dtype=dtype, device=x_RC.device)
    inverse_scale = torch.empty((), dtype=torch.float32, device=x_RC.device)
    grid = (triton.cdiv(rows, TILE_ROWS), triton.cdiv(columns, TILE_COLUMNS))
    _cast[grid](
        x_RC, maxima, straight, turned, inverse_scale, rows, columns, torch.finfo(dtype).max,
        AS_IS=as_is, TRANSPOSED=transposed,
        MAXIMA=maxima.numel(), TILE_R=TILE_ROWS, TILE_C=TILE_COLUMNS, num_warps=CAST_WARPS,
    )  # fmt: skip
    return straight, turned, inverse_scale
