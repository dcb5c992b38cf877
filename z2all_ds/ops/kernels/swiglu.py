"""silu(gate) * up on the two halves of one tensor, and its gradients into the two halves of one tensor.

The backward kernel also recomputes the product: so the forward pass need not keep it, and the next matrix product has
its input for the weight's gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
WARPS = 4


@triton.jit
def _forward(gate_up_ptr, product_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(product_ptr + row * width + columns, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _backward(gate_up_ptr, d_product_ptr, d_gate_up_ptr, product_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate_place = row * 2 * width + columns
    place = row * width + columns
    gate = tl.load(gate_up_ptr + gate_place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + gate_place + width, mask=inside, other=0.0).to(tl.float32)
    d_product = tl.load(d_product_ptr + place, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    tl.store(product_ptr + place, silu * up, mask=inside)
    tl.store(d_gate_up_ptr + gate_place, d_product * up * (share + silu * (1.0 - share)), mask=inside)
    tl.store(d_gate_up_ptr + gate_place + width, d_product * silu, mask=inside)


def forward(gate_up: Tensor) -> Tensor:
    """[..., 2F] contiguous -> [..., F]."""
    width = gate_up.shape[-1] // 2
    product = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    _forward[_grid(product, width)](gate_up, product, width, BLOCK=BLOCK, num_warps=WARPS)
    return product


def backward(gate_up: Tensor, d_product: Tensor) -> tuple[Tensor, Tensor]:
    """Return (gradient of gate_up, the recomputed product), all contiguous."""
    width = gate_up.shape[-1] // 2
    product, d_gate_up = torch.empty_like(d_product), torch.empty_like(gate_up)
    _backward[_grid(product, width)](gate_up, d_product, d_gate_up, product, width, BLOCK=BLOCK, num_warps=WARPS)
    return d_gate_up, product


def _grid(product: Tensor, width: int) -> tuple[int, int]:
    # Rows first: the second axis of a grid is limited to 65,535.
    return product.numel() // width, triton.cdiv(width, BLOCK)
