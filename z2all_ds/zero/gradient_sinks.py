"""Gives each bf16 weight the place in DeepSpeed's fp32 gradients where its own gradient is added up.

DeepSpeed's BF16 optimizer (ZeRO-1 with fp32 accumulation) keeps one flat fp32 gradient and adds every micro-batch's
bf16 gradients to it in a pass of its own, after zeroing them in another. With sinks (`ops/gradient_sink.py`) the
products of the backward pass add to the flat gradient directly, and neither pass has anything to do. What is reduced
between ranks, clipped and stepped is the same flat gradient as before.
"""

from typing import Any

import torch

from z2all_ds.ops import gradient_sink


class GradientSinks:
    """For optimizers that have such a gradient; for others it does nothing."""

    def __init__(self, engine: Any) -> None:
        optimizer = engine.optimizer
        has_fp32_gradients = getattr(optimizer, "grad_acc_dtype", None) == torch.float32
        self.active = has_fp32_gradients and hasattr(optimizer, "fp32_groups_gradients_flat")
        if not self.active:
            return
        self._optimizer = optimizer
        for weights, gradients in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True):
            for weight, gradient in zip(weights, gradients, strict=True):
                gradient_sink.attach(weight, gradient.view(weight.shape))
        optimizer.get_grads_for_norm = self._gradients_for_norm
        if engine.dp_world_size == 1:
            # Alone there is nothing to reduce; DeepSpeed would still round the gradients to bf16 to send them nowhere.
            engine.enable_backward_allreduce = False

    def _gradients_for_norm(self, for_clipping: bool = False) -> Any:
        """In place of DeepSpeed's list of the gradients that it has added up itself: all, and flat.

        Norm and clipping are then a few kernels instead of several for each weight.
        """
        flat = self._optimizer.fp32_groups_actual_gradients_flat
        return flat if for_clipping else (flat, {})

    def clear(self) -> None:
        """Forgets what has been added up since the last step."""
        self._optimizer.clear_hp_grads()
