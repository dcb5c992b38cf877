"""Lets each bf16 weight accumulate its gradient directly in DeepSpeed's fp32 gradient buffer.

DeepSpeed's BF16 optimizer (ZeRO-1 with fp32 accumulation) has one flat fp32 gradient, adds every micro-batch's bf16
gradients to it in a separate pass, and zeroes them in another. With sinks (`ops/gradient_sink.py`) the products of the
backward pass add to the flat gradient directly, and both passes become empty. Reduction between ranks, clipping and the
step use the same flat gradient as before.
"""

from typing import Any

import torch

from z2all_ds.ops import gradient_sink


class GradientSinks:
    """Sinks for optimizers with such a gradient; does nothing for others."""

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
            # Nothing to reduce on a single rank; DeepSpeed would still round the gradients to bf16 for communication.
            engine.enable_backward_allreduce = False

    def _gradients_for_norm(self, for_clipping: bool = False) -> Any:
        """Return all gradients, flat, instead of DeepSpeed's list of the gradients that it accumulated itself.

        Norm and clipping then need a few kernels in total instead of several per weight.
        """
        flat = self._optimizer.fp32_groups_actual_gradients_flat
        return flat if for_clipping else (flat, {})

    def clear(self) -> None:
        """Clear the gradients accumulated since the last step."""
        self._optimizer.clear_hp_grads()
