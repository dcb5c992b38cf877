"""Weight gradients added up in fp32 by the product that makes them.

With bf16 weights, gradients of several micro-batches must be added up in fp32. Done in a pass of its own this costs
about 12 bytes of traffic a parameter and micro-batch, and a bf16 gradient that is only made to be added. A weight with
a `gradient_sink` (an fp32 tensor of its shape, where the optimizer reads it) needs neither: the backward pass of its op
adds to the sink and hands autograd no gradient at all. The ops keep the weight itself in their context, not among the
saved tensors: activation checkpointing hands those back as copies, which know no sink.
"""

import torch
from torch import Tensor

ATTRIBUTE = "gradient_sink"


def sink_of(weight: Tensor | None) -> Tensor | None:
    """Where this weight's gradient goes; None: autograd handles it."""
    return getattr(weight, ATTRIBUTE, None)


def attach(weight: Tensor, sink: Tensor) -> None:
    assert sink.shape == weight.shape, (sink.shape, weight.shape)
    setattr(weight, ATTRIBUTE, sink)


def add_product(weight: Tensor, dy_NO: Tensor, x_NI: Tensor) -> Tensor | None:
    """The gradient dy^T x of a matrix [O, I]: into its sink, or returned where it has none."""
    sink = sink_of(weight)
    if sink is None:
        return dy_NO.t() @ x_NI
    if sink.dtype == dy_NO.dtype:
        sink.addmm_(dy_NO.t(), x_NI)
    elif dy_NO.is_cuda:
        # cuBLAS multiplies bf16 and adds to fp32 in one kernel; in-place forms of addmm have no out_dtype.
        torch.ops.aten.addmm.dtype_out(sink, dy_NO.t(), x_NI, sink.dtype, out=sink)
    else:
        sink.addmm_(dy_NO.t().to(sink.dtype), x_NI.to(sink.dtype))
    return None


def add(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """A finished gradient: into the sink, or returned in the weight's dtype."""
    sink = sink_of(weight)
    if sink is None:
        return gradient.to(weight.dtype)
    sink.add_(gradient)
    return None


def add_rows(bias: Tensor, dy_NO: Tensor) -> Tensor | None:
    """The gradient of a bias [O]: the sum of the rows, in the sink's precision where there is one."""
    sink = sink_of(bias)
    return add(bias, dy_NO.sum(0, dtype=None if sink is None else sink.dtype))
