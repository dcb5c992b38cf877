"""Accumulation of weight gradients in fp32 by the product that computes them.

With bf16 weights, gradients of several micro-batches must be accumulated in fp32. A separate pass costs about 12 bytes
of memory traffic per parameter per micro-batch, and a temporary bf16 gradient. A weight with a `gradient_sink` (an fp32
tensor of its shape that the optimizer reads) needs neither: the backward pass of its op adds to the sink and returns no
gradient to autograd. The ops keep the weight itself in their context, not among the saved tensors: activation
checkpointing returns those as copies without a sink.
"""

import torch
from torch import Tensor

ATTRIBUTE = "gradient_sink"


def sink_of(weight: Tensor | None) -> Tensor | None:
    """Return the sink of this weight; None if autograd handles its gradient."""
    return getattr(weight, ATTRIBUTE, None)


def attach(weight: Tensor, sink: Tensor) -> None:
    assert sink.shape == weight.shape, (sink.shape, weight.shape)
    setattr(weight, ATTRIBUTE, sink)


def add_product(weight: Tensor, dy_NO: Tensor, x_NI: Tensor) -> Tensor | None:
    """Add the gradient dy^T x of a matrix [O, I] to its sink; return it if there is none."""
    sink = sink_of(weight)
    if sink is None:
        return dy_NO.t() @ x_NI
    if sink.dtype == dy_NO.dtype:
        sink.addmm_(dy_NO.t(), x_NI)
    elif dy_NO.is_cuda:
        # cuBLAS multiplies bf16 and adds to fp32 in one kernel; in-place addmm has no out_dtype.
        torch.ops.aten.addmm.dtype_out(sink, dy_NO.t(), x_NI, sink.dtype, out=sink)
    else:
        sink.addmm_(dy_NO.t().to(sink.dtype), x_NI.to(sink.dtype))
    return None


def add(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """Add a finished gradient to the sink, or return it in the weight's dtype."""
    sink = sink_of(weight)
    if sink is None:
        return gradient.to(weight.dtype)
    sink.add_(gradient)
    return None


def add_rows(bias: Tensor, dy_NO: Tensor) -> Tensor | None:
    """Add the gradient of a bias [O], the sum of the rows, in the sink's precision; return it if there is no sink."""
    sink = sink_of(bias)
    return add(bias, dy_NO.sum(0, dtype=None if sink is None else sink.dtype))
