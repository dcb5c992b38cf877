"""The matrix product x W^T + b.

Contract: `linear(x, weight, bias)`, x [..., I], weight [O, I], bias [O] or None.
"""

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from z2all_ds.ops import gradient_sink
from z2all_ds.ops.registry import backend


class _SinkLinear(Function):
    """For weights with a gradient sink."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        dy_NO = gradients[0].reshape(-1, weight.shape[0])
        dx = (dy_NO @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        d_weight = gradient_sink.add_product(weight, dy_NO, x.reshape(-1, weight.shape[1]))
        d_bias = gradient_sink.add(bias, dy_NO.sum(0)) if bias is not None else None
        return dx, d_weight, d_bias


@backend("linear", "torch")
def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's own product, in whatever dtype the model has."""
    if gradient_sink.sink_of(weight) is None:
        return functional.linear(x, weight, bias)
    out: Tensor = _SinkLinear.apply(x, weight, bias)
    return out
