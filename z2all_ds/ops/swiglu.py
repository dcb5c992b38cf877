"""SwiGLU: silu(gate) * up.

Contract: `swiglu(gate, up)`, both [..., intermediate size]; halves of one product, so not always contiguous.
"""

from torch import Tensor
from torch.nn import functional

from z2all_ds.ops.registry import backend, needs_library


@backend("swiglu", "liger", needs_library("liger_kernel.ops.swiglu", "liger-kernel"))
def liger(gate: Tensor, up: Tensor) -> Tensor:
    """One Triton kernel that keeps gate and up only, and recomputes silu in the backward pass."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    product: Tensor = LigerSiLUMulFunction.apply(gate.contiguous(), up.contiguous())
    return product


@backend("swiglu", "torch")
def reference(gate: Tensor, up: Tensor) -> Tensor:
    """The reference."""
    return functional.silu(gate) * up
