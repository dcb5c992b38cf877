"""SwiGLU and the product after it: linear(silu(gate) * up).

Contract: `swiglu(gate_up, weight, bias, linear)` with gate_up [..., 2F] = gate | up, weight [O, F] and the selected
backend of `linear`. The product is part of the contract because the intermediate [..., F] need not be kept.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from z2all_ds.ops import gradient_sink
from z2all_ds.ops.registry import Situation, backend, needs_library

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class _SwigluLinear(Function):
    """Triton kernel; keeps only gate_up and recomputes silu(gate) * up in the pass that computes its gradients."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from z2all_ds.ops.kernels import swiglu as kernel

        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        ctx.weight, ctx.bias = weight, bias
        return functional.linear(kernel.forward(gate_up), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from z2all_ds.ops.kernels import swiglu as kernel

        (gate_up,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        dy_NO = gradients[0].reshape(-1, weight.shape[0])
        d_product_NF = dy_NO @ weight
        d_gate_up, product_NF = kernel.backward(gate_up.view(-1, gate_up.shape[-1]), d_product_NF)
        d_weight = gradient_sink.add_product(weight, dy_NO, product_NF)
        d_bias = gradient_sink.add_rows(bias, dy_NO) if bias is not None else None
        return d_gate_up.view(gate_up.shape), d_weight, d_bias


class _Swiglu(Function):
    """The kernel without the matrix product, for other linear backends (fp8)."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        from z2all_ds.ops.kernels import swiglu as kernel

        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return kernel.forward(gate_up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        from z2all_ds.ops.kernels import swiglu as kernel

        (gate_up,) = ctx.saved_tensors
        return kernel.backward(gate_up, gradients[0].contiguous())[0]


@backend("swiglu", "triton", needs_library("triton", "triton"))
def triton(gate_up: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear) -> Tensor:
    """This package's kernel, directly on the fused product; silu(gate) * up is not kept."""
    from z2all_ds.ops.linear import reference as plain_linear

    if linear is not plain_linear:
        return linear(_Swiglu.apply(gate_up), weight, bias)
    out: Tensor = _SwigluLinear.apply(gate_up, weight, bias)
    return out


@backend("swiglu", "liger", needs_library("liger_kernel.ops.swiglu", "liger-kernel"))
def liger(gate_up: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear) -> Tensor:
    """Liger's Triton kernel, which keeps gate and up and recomputes silu in the backward pass."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    # Its backward pass overwrites gate and up. Halves of one product must be copied anyway, except for a single token,
    # where `contiguous` would return the caller's own tensors; `clone` never does.
    gate, up = (half.clone(memory_format=torch.contiguous_format) for half in gate_up.chunk(2, dim=-1))
    return linear(LigerSiLUMulFunction.apply(gate, up), weight, bias)


def _xformers_has_a_kernel(situation: Situation) -> str | None:
    refusal = needs_library("xformers.ops", "xformers")(situation)
    if refusal:
        return refusal
    if situation.dtype not in ("bf16", "fp16"):
        return f"computes in bf16 and fp16 only, the model computes in {situation.dtype}"
    if hasattr(torch.ops.xformers, "silu_bw_fused"):
        return None
    import xformers

    return f"xformers {xformers.__version__} no longer has fused SwiGLU (no xformers::silu_bw_fused), only plain torch"


class _XformersSwiglu(Function):
    """xformers fused the products too; for a finished gate_up only its kernel for the backward pass is useful."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = (half.reshape(-1, half.shape[-1]).contiguous() for half in gate_up.chunk(2, dim=-1))
        d_product_NF = gradients[0].reshape(gate.shape).contiguous()
        d_gate_up_N2F, _ = torch.ops.xformers.silu_bw_fused(gate, up, d_product_NF)
        d_gate_up: Tensor = d_gate_up_N2F.view(gate_up.shape)
        return d_gate_up


@backend("swiglu", "xformers", _xformers_has_a_kernel)
def xformers(gate_up: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear) -> Tensor:
    """xformers' kernel for the backward pass, if the installed version still has it (0.0.35 does not)."""
    return linear(_XformersSwiglu.apply(gate_up), weight, bias)


@backend("swiglu", "torch")
def reference(gate_up: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear) -> Tensor:
    """The reference."""
    gate, up = gate_up.chunk(2, dim=-1)
    return linear(functional.silu(gate) * up, weight, bias)
