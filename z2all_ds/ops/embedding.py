"""Embedding lookup. There are no backends: only the destination of the gradient differs."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from z2all_ds.ops import gradient_sink


class _SinkEmbedding(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        weight = ctx.weight
        sink = gradient_sink.sink_of(weight)
        assert sink is not None
        rows = gradients[0].reshape(-1, weight.shape[1]).to(sink.dtype)
        if ctx.padding is not None:
            rows = rows.masked_fill((ids.reshape(-1) == ctx.padding)[:, None], 0.0)
        # index_put_ sorts the ids and adds in a fixed order; index_add_ would add in the order of threads.
        sink.index_put_((ids.reshape(-1),), rows, accumulate=True)
        return None, None, None


def embedding(ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
    """Return rows for ids: [...] -> [..., width]; as in torch, the row `padding` gets no gradient."""
    if gradient_sink.sink_of(weight) is None or not torch.is_grad_enabled():
        return functional.embedding(ids, weight, padding)
    out: Tensor = _SinkEmbedding.apply(ids, weight, padding)
    return out
