"""RMSNorm over the last dimension, statistics in fp32, product with the weight in the input's dtype (as Llama does).

Contract: `rms_norm(x, weight, eps)`.
"""

import torch
from torch import Tensor

from z2all_ds.ops.registry import backend, needs_library


@backend("rms_norm", "liger", needs_library("liger_kernel.ops.rms_norm", "liger-kernel"))
def liger(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One Triton kernel; casting mode "llama" is the reference's order of roundings."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # Arguments: offset 0, casting mode, and not in place: in place would write over the gradient that comes in.
    normed: Tensor = LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)
    return normed


@backend("rms_norm", "torch")
def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The reference."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)
