"""The matrix product x W^T + b.

Contract: `linear(x, weight, bias)`, x [..., I], weight [O, I], bias [O] or None.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from z2all_ds.ops import gradient_sink
from z2all_ds.ops.registry import Situation, backend, needs_library

FP8_MULTIPLE = 16
"""Hopper's 8-bit products need both dimensions of both factors to be multiples of 16 bytes."""


class _SinkLinear(Function):
    """Linear layer for weights with a gradient sink."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias = weight, bias
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        dy_NO = gradients[0].reshape(-1, weight.shape[0])
        dx = (dy_NO @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        d_weight = gradient_sink.add_product(weight, dy_NO, x.reshape(-1, weight.shape[1]))
        d_bias = gradient_sink.add_rows(bias, dy_NO) if bias is not None else None
        return dx, d_weight, d_bias


class _Fp8Linear(Function):
    """All three products in fp8 with fp32 sums: weight and input in e4m3, the gradient, whose range is wider, in e5m2.

    Each factor is cast with one scale from its own largest entry. The input for the weight's gradient is kept only in
    fp8, half the memory of bf16.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from z2all_ds.ops.kernels import fp8

        x_NI = x.reshape(-1, x.shape[-1]).contiguous()
        x8_NI, x8_IN, x_scale = fp8.cast(x_NI, torch.float8_e4m3fn, fp8.largest_entries(x_NI))
        w_maxima = fp8.largest_entries(weight.detach())
        w8_OI, _, w_scale = fp8.cast(weight.detach(), torch.float8_e4m3fn, w_maxima, transposed=False)
        ctx.save_for_backward(x8_IN, x_scale, w_maxima)
        ctx.weight, ctx.bias, ctx.x_shape = weight, bias, x.shape
        y_NO = torch._scaled_mm(x8_NI, w8_OI.t(), x_scale, w_scale, out_dtype=x.dtype, use_fast_accum=True)
        y = y_NO.view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from z2all_ds.ops.kernels import fp8

        x8_IN, x_scale, w_maxima = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        dy_NO = gradients[0].reshape(-1, weight.shape[0]).contiguous()
        dy8_NO, dy8_ON, dy_scale = fp8.cast(dy_NO, torch.float8_e5m2, fp8.largest_entries(dy_NO))
        # Cast again instead of kept: the fp8 weights of all layers would need half the model's memory.
        _, w8_IO, w_scale = fp8.cast(weight.detach(), torch.float8_e4m3fn, w_maxima, as_is=False)
        # Full accumulation for gradients: fast accumulation keeps fewer bits between the pieces of a long sum.
        dx_NI = torch._scaled_mm(dy8_NO, w8_IO.t(), dy_scale, w_scale, out_dtype=dy_NO.dtype, use_fast_accum=False)
        dw_OI = torch._scaled_mm(dy8_ON, x8_IN.t(), dy_scale, x_scale, out_dtype=dy_NO.dtype, use_fast_accum=False)
        d_bias = gradient_sink.add_rows(bias, dy_NO) if bias is not None else None
        return dx_NI.view(ctx.x_shape), gradient_sink.add(weight, dw_OI), d_bias


def _fp8_runs(situation: Situation) -> str | None:
    refusal = needs_library("triton", "triton")(situation)
    if refusal:
        return refusal
    if situation.dtype != "bf16":
        return f"casts from bf16, the model computes in {situation.dtype}"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        return "needs a GPU with 8-bit tensor cores (compute capability 8.9 or later)"
    return None


@backend("linear", "fp8", _fp8_runs, by_request=True)
def fp8(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Casts of this package, 8-bit products of torch; unsupported sizes (tokens too) use the model's precision."""
    if _no_fp8_shape(x, weight):
        return reference(x, weight, bias)
    out: Tensor = _Fp8Linear.apply(x, weight, bias)
    return out


def _torchao_runs(situation: Situation) -> str | None:
    return _fp8_runs(situation) or needs_library("torchao.float8.float8_linear", "torchao")(situation)


@cache
def _torchao_settings() -> tuple[Any, Any]:
    """Return torchao's default recipe (one scale per tensor), read from a layer on the meta device."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    plain = nn.Linear(FP8_MULTIPLE, FP8_MULTIPLE, bias=False, device="meta")
    layer = Float8Linear.from_float(plain, config=Float8LinearConfig())
    return layer.linear_mm_config, layer.config


@backend("linear", "fp8_torchao", _torchao_runs, by_request=True)
def fp8_torchao(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torchao's 8-bit products, whose casts are separate passes unless compiled; unsupported sizes as `torch`."""
    if _no_fp8_shape(x, weight):
        return reference(x, weight, bias)
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    out: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), *_torchao_settings())
    return out if bias is None else out + bias


def _no_fp8_shape(x: Tensor, weight: Tensor) -> bool:
    tokens = x.numel() // x.shape[-1]
    return any(size % FP8_MULTIPLE for size in (tokens, *weight.shape))


@backend("linear", "torch")
def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's own product in the model's dtype."""
    if gradient_sink.sink_of(weight) is None:
        return functional.linear(x, weight, bias)
    out: Tensor = _SinkLinear.apply(x, weight, bias)
    return out
