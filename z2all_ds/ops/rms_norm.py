"""RMSNorm of the residual stream, including the residual sum.

Statistics in fp32, product with the weight in the weight's dtype (as Llama does). Contract:
`rms_norm(x, residual, weight, eps) -> (normed, stream)`: stream = x + residual in the residual's dtype, or x if there
is no residual; normed = weight * (stream / its root mean square).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from z2all_ds.ops import gradient_sink
from z2all_ds.ops.registry import Situation, backend, needs_library


class _AddRMSNorm(Function):
    """Triton kernel: sum and norm in one pass, and their gradients in one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor | None]:
        from z2all_ds.ops.kernels import rms_norm as kernel

        normed, stream, rstd = kernel.forward(
            x.contiguous(), None if residual is None else residual.contiguous(), weight, eps
        )
        ctx.save_for_backward(stream, rstd)
        ctx.weight, ctx.x_dtype, ctx.has_residual = weight, x.dtype, residual is not None
        ctx.set_materialize_grads(False)
        return normed, None if residual is None else stream

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        from z2all_ds.ops.kernels import rms_norm as kernel

        stream, rstd = ctx.saved_tensors
        weight = ctx.weight
        d_normed, d_stream = gradients
        if d_normed is None:
            return (
                None if d_stream is None else d_stream.to(ctx.x_dtype),
                d_stream if ctx.has_residual else None,
                None,
                None,
            )
        dx, d_weight = kernel.backward(
            stream,
            weight,
            rstd,
            d_normed.contiguous(),
            None if d_stream is None else d_stream.contiguous(),
            gradient_sink.sink_of(weight),
        )
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        return dx.to(ctx.x_dtype), dx if ctx.has_residual else None, d_weight, None


@backend("rms_norm", "triton", needs_library("triton", "triton"))
def triton(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """This package's kernel, including the residual sum."""
    normed, stream = _AddRMSNorm.apply(x, residual, weight, eps)
    return normed, x if residual is None else stream


@backend("rms_norm", "liger", needs_library("liger_kernel.ops.rms_norm", "liger-kernel"))
def liger(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Liger's Triton kernel; casting mode "llama" rounds in the order of the reference. The sum is torch's."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    stream = x if residual is None else x + residual
    # Arguments: offset 0, casting mode, and not in place, which would overwrite the incoming gradient.
    normed: Tensor = LigerRMSNormFunction.apply(stream, weight, eps, 0.0, "llama", False)
    return normed.to(weight.dtype), stream


def _apex_is_nvidias(situation: Situation) -> str | None:
    if situation.device != "cuda":
        return f"needs a GPU, the model is on {situation.device}"
    try:
        import fused_layer_norm_cuda  # noqa: F401 - the compiled part, which a build of apex can lack
        from apex.normalization import FusedRMSNorm  # noqa: F401
    except ImportError as error:
        return f"cannot import NVIDIA's apex ({error}); build it from NVIDIA's sources, PyPI's apex is another package"
    return None


@backend("rms_norm", "apex", _apex_is_nvidias)
def apex(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """NVIDIA's apex. It rounds once, after the product with the weight. The sum is torch's."""
    from apex.normalization import fused_layer_norm

    stream = x if residual is None else x + residual
    same_dtype = stream.dtype == weight.dtype
    function = (
        fused_layer_norm.fused_rms_norm_affine if same_dtype else fused_layer_norm.mixed_dtype_fused_rms_norm_affine
    )
    normed: Tensor = function(stream.contiguous(), weight, weight.shape, eps)
    return normed.to(weight.dtype), stream


@backend("rms_norm", "torch")
def reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The reference."""
    stream = x if residual is None else x + residual
    wide = stream.to(torch.promote_types(stream.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(weight.dtype), stream
