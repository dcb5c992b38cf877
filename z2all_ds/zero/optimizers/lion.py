"""Lion (arXiv 2302.06675): the update is the sign of an interpolated momentum, so the state is a single moment."""

from typing import Any

import torch
from torch import Tensor

from z2all_ds.zero.optimizers.chunks import batches, flat_gradient_pieces, flat_pieces


class Lion(torch.optim.Optimizer):
    """weight -= lr * (sign(beta1 m + (1 - beta1) g) + decay * weight); m = beta2 m + (1 - beta2) g.

    State: momentum, in the weight's dtype.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rows: list[tuple[Tensor, ...]] = []
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                pieces = flat_pieces(weight), flat_gradient_pieces(weight.grad), flat_pieces(state["momentum"])
                rows += zip(*pieces, strict=True)
            for weights, gradients, momenta in batches(rows):
                self._step_batch(weights, gradients, momenta, group)

    def _step_batch(
        self, weights: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], group: dict[str, Any]
    ) -> None:
        beta1, beta2 = group["betas"]
        directions = torch._foreach_lerp(momenta, gradients, 1 - beta1)
        signs = torch._foreach_sign(directions)
        # The sign of NaN is 0, so the weight would silently not change. 0 x NaN is NaN, and so is 0 x inf.
        torch._foreach_mul_(directions, 0.0)
        torch._foreach_add_(signs, directions)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, signs, alpha=-group["lr"])
        torch._foreach_lerp_(momenta, gradients, 1 - beta2)
