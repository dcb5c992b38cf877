"""The output head and the cross-entropy of its logits, per token, so that the loss per domain has no extra cost.

Contract: `cross_entropy(hidden, weight, labels) -> (total, losses)` with hidden [N, D], weight [V, D], labels [N],
-100 for ignored positions; `total` is the sum of the losses (fp32, differentiable), `losses` [N] in fp32 and without a
gradient, 0 for ignored positions. The head is part of the op because the logits are the largest tensor of the whole
step, and need not all exist at once. Gradients of individual losses are not supported: with equal weights, gradients
can be computed while the logits exist.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from z2all_ds.base.errors import ConfigError
from z2all_ds.ops import gradient_sink
from z2all_ds.ops.linear import reference as linear
from z2all_ds.ops.registry import backend, needs_library

IGNORED_LABEL = -100
CHUNK_LOGITS = 2**26
"""Logits per chunk: 128 MiB in bf16, 1043 tokens of a vocabulary of 64320; enough rows to use a GPU fully."""


class _InPlace(Function):
    """Triton kernel on all logits in the model's dtype; the gradient overwrites them. The fastest."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
        from z2all_ds.ops.kernels import cross_entropy as kernel

        logits_NV = functional.linear(hidden_ND, weight)
        losses_N, log_sums_N = kernel.losses_and_log_sums(logits_NV, labels_N, IGNORED_LABEL)
        ctx.save_for_backward(hidden_ND, labels_N, logits_NV, log_sums_N)
        ctx.weight = weight
        ctx.mark_non_differentiable(losses_N)
        ctx.written_over = False
        return losses_N.sum(), losses_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from z2all_ds.ops.kernels import cross_entropy as kernel

        hidden_ND, labels_N, logits_NV, log_sums_N = ctx.saved_tensors
        weight = ctx.weight
        assert not ctx.written_over, "the gradient has overwritten the logits: only one backward pass is possible"
        kernel.gradient_in_place(logits_NV, labels_N, log_sums_N, gradients[0], IGNORED_LABEL)
        ctx.written_over = True
        d_weight = gradient_sink.add_product(weight, logits_NV, hidden_ND)
        return logits_NV @ weight, d_weight, None


@backend("cross_entropy", "triton", needs_library("triton", "triton"))
def triton(hidden_ND: Tensor, weight: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """This package's kernel on all logits at once, in the model's dtype."""
    total, losses_N = _InPlace.apply(hidden_ND, weight, labels_N)
    return total, losses_N


class _Chunked(Function):
    """Computes the logits piece by piece, and again in the backward pass: one product more, never all logits."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
        pieces = [
            _losses_and_log_sums(functional.linear(hidden_ND[rows], weight), labels_N[rows])
            for rows in _chunks(hidden_ND, weight)
        ]
        losses_N, log_sums_N = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        ctx.save_for_backward(hidden_ND, labels_N, log_sums_N)
        ctx.weight = weight
        ctx.mark_non_differentiable(losses_N)
        return losses_N.sum(), losses_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, labels_N, log_sums_N = ctx.saved_tensors
        weight = ctx.weight
        d_hidden = torch.empty_like(hidden_ND)
        d_weight: Tensor | None = None
        for rows in _chunks(hidden_ND, weight):
            d_logits = functional.linear(hidden_ND[rows], weight)
            _gradient_in_place(d_logits, labels_N[rows], log_sums_N[rows], gradients[0])
            torch.mm(d_logits, weight, out=d_hidden[rows])
            part = gradient_sink.add_product(weight, d_logits, hidden_ND[rows])
            if part is not None:
                # Without a sink, still fp32 between the chunks: bf16 sums would lose precision with each chunk.
                wide = part.to(torch.promote_types(part.dtype, torch.float32))
                d_weight = wide if d_weight is None else d_weight.add_(wide)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None


@backend("cross_entropy", "chunked", by_request=True)
def chunked(hidden_ND: Tensor, weight: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Logits piece by piece, recomputed in the backward pass: least memory, one product more."""
    refuse_unknown_labels(labels_N, weight.shape[0])
    total, losses_N = _Chunked.apply(hidden_ND, weight, labels_N)
    return total, losses_N


def _chunks(hidden_ND: Tensor, weight: Tensor) -> list[slice]:
    rows_at_a_time = max(1, CHUNK_LOGITS // weight.shape[0])
    return [slice(first, first + rows_at_a_time) for first in range(0, hidden_ND.shape[0], rows_at_a_time)]


def _losses_and_log_sums(logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    if logits_NV.is_cuda:
        from z2all_ds.ops.kernels import cross_entropy as kernel

        return kernel.losses_and_log_sums(logits_NV, labels_N, IGNORED_LABEL)
    log_sums_N = _widened(logits_NV).logsumexp(-1)
    counts = labels_N != IGNORED_LABEL
    picked_N = logits_NV.gather(-1, labels_N.clamp_min(0)[:, None]).squeeze(-1)
    return torch.where(counts, log_sums_N - picked_N, 0.0), log_sums_N


def _gradient_in_place(logits_NV: Tensor, labels_N: Tensor, log_sums_N: Tensor, scale: Tensor) -> None:
    if logits_NV.is_cuda:
        from z2all_ds.ops.kernels import cross_entropy as kernel

        kernel.gradient_in_place(logits_NV, labels_N, log_sums_N, scale, IGNORED_LABEL)
        return
    counts = labels_N != IGNORED_LABEL
    shares_NV = (_widened(logits_NV) - log_sums_N[:, None]).exp()
    shares_NV.scatter_add_(1, labels_N.clamp_min(0)[:, None], shares_NV.new_full((len(labels_N), 1), -1.0))
    logits_NV.copy_((shares_NV * scale).masked_fill(~counts[:, None], 0.0))


def _widened(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@backend("cross_entropy", "liger", needs_library("liger_kernel.ops.cross_entropy", "liger-kernel"))
def liger(hidden_ND: Tensor, weight: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Liger's Triton kernel on all logits, in fp32 since losses have the logits' dtype; the host waits for it."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    # It overwrites the logits with the gradient in the forward pass; nothing else reads them.
    logits_NV = _widened(linear(hidden_ND, weight, None))
    known_N, unknown_N = _known_labels(labels_N, weight.shape[0])
    # No class weights, z-loss or smoothing.
    losses_N, *_ = LigerCrossEntropyFunction.apply(logits_NV, known_N, None, IGNORED_LABEL, 0.0, 0.0, "none")
    losses_N = losses_N.masked_fill(unknown_N, float("nan"))
    return losses_N.sum(), losses_N.detach()


@backend("cross_entropy", "flash_attn", needs_library("flash_attn.ops.triton.cross_entropy", "flash-attn"))
def flash_attn(hidden_ND: Tensor, weight: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """flash-attn's Triton kernel on all logits; the gradient overwrites them: one backward pass only."""
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    known_N, unknown_N = _known_labels(labels_N, weight.shape[0])
    losses_N, _ = cross_entropy_loss(
        linear(hidden_ND, weight, None), known_N, ignore_index=IGNORED_LABEL, inplace_backward=True
    )
    losses_N = losses_N.masked_fill(unknown_N, float("nan"))
    return losses_N.sum(), losses_N.detach()


def _known_labels(labels_N: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return the labels with invalid tokens set to ignored, and a mask of them.

    On a GPU, torch and Liger abort the process at an invalid label, and flash-attn returns a loss of 0.
    """
    unknown_N = _unknown(labels_N, vocabulary)
    return labels_N.masked_fill(unknown_N, IGNORED_LABEL), unknown_N


def _unknown(labels_N: Tensor, vocabulary: int) -> Tensor:
    return ((labels_N < 0) | (labels_N >= vocabulary)) & (labels_N != IGNORED_LABEL)


@backend("cross_entropy", "torch")
def reference(hidden_ND: Tensor, weight: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """The reference: all logits, in fp32."""
    refuse_unknown_labels(labels_N, weight.shape[0])
    logits_NV = _widened(linear(hidden_ND, weight, None))
    known_N, unknown_N = _known_labels(labels_N, weight.shape[0])
    losses_N = functional.cross_entropy(logits_NV, known_N, ignore_index=IGNORED_LABEL, reduction="none")
    losses_N = losses_N.masked_fill(unknown_N, float("nan"))
    return losses_N.sum(), losses_N.detach()


def refuse_unknown_labels(labels_N: Tensor, vocabulary: int) -> None:
    """Raise a one-line error for an invalid label. On a GPU this would synchronize: there the loss becomes NaN."""
    if labels_N.is_cuda:
        return
    wrong = labels_N[_unknown(labels_N, vocabulary)]
    if len(wrong):
        raise ConfigError(
            f"label {int(wrong[0])}",
            f"must be a token id from 0 to {vocabulary - 1}, or {IGNORED_LABEL} for an ignored position",
            "Use the vocabulary of the tokenizer that made the labels.",
        )
