"""SwiGLU: silu(gate) * up.

Contract: `swiglu(gate, up)`, both [..., intermediate size]; halves of one product, so not always contiguous.
"""

import torch
from torch import Tensor
from torch.nn import functional

from z2all_ds.ops.registry import backend, needs_library


@backend("swiglu", "liger", needs_library("liger_kernel.ops.swiglu", "liger-kernel"))
def liger(gate: Tensor, up: Tensor) -> Tensor:
    """One Triton kernel that keeps gate and up only, and recomputes silu in the backward pass; that pass runs once."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    # Its backward pass writes the gradients over gate and up. Halves of one product have to be copied anyway, but for a
    # single token, where `contiguous` would hand over the caller's own tensors; `clone` never does.
    gate, up = (half.clone(memory_format=torch.contiguous_format) for half in (gate, up))
    product: Tensor = LigerSiLUMulFunction.apply(gate, up)
    return product


@backend("swiglu", "torch")
def reference(gate: Tensor, up: Tensor) -> Tensor:
    """The reference."""
    return functional.silu(gate) * up
