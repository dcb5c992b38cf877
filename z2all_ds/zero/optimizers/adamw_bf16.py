"""AdamW with both moments in bf16: 4 bytes of state per parameter instead of 8.

Moments are updated in fp32 and rounded stochastically (rounded to nearest, a second moment with beta 0.999 would never
change: its change is below the resolution of bf16). The step itself uses the moments before rounding. If the weight is
bf16 too, its rounding error is kept and added the next time (2 more bytes), or it is rounded stochastically.

The random numbers depend only on (tensor, step), so nothing random has to be saved, and a resumed run draws the same.
They are also the same on every rank: replicas (ZeRO stage 0) must not diverge, and in partitions, which hold different
weights, shared noise does no harm.
"""

from collections.abc import Iterable
from functools import cache
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor

from z2all_ds.zero.optimizers.chunks import CHUNK, flat_gradient_pieces, flat_pieces
from z2all_ds.zero.optimizers.rounding import join, round_stochastically, seed_from, split


@cache
def _fused_step() -> Any:
    """Return the module of the kernel if triton is installed."""
    try:
        from z2all_ds.ops.kernels import adamw_bf16
    except ImportError:
        return None
    return adamw_bf16


class AdamWBf16(torch.optim.Optimizer):
    """AdamW. State: exp_avg, exp_avg_sq (bf16), compensation (int16, for bf16 weights with kahan)."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        rounding: Literal["kahan", "stochastic"] = "kahan",
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.rounding = rounding
        self._generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.dtype in (torch.float32, torch.bfloat16)
        state = self.state[parameter]
        if not state:
            # ZeRO-3 passes one tensor at a time, so the position in the group does not identify it.
            state["number"] = len(self.state)
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        if parameter.dtype == torch.bfloat16 and self.rounding == "kahan" and "compensation" not in state:
            state["compensation"] = torch.zeros_like(parameter, dtype=torch.int16)
        state["step"] += 1
        step = _fused_step() if parameter.is_cuda else None
        size = step.MOST_PER_LAUNCH if step else CHUNK
        weights, squares = flat_pieces(parameter, size), flat_pieces(state["exp_avg_sq"], size)
        assert parameter.grad is not None
        gradients, moments = flat_gradient_pieces(parameter.grad, size), flat_pieces(state["exp_avg"], size)
        compensations: Iterable[Tensor | None] = repeat(None, len(weights))
        if self.rounding == "kahan" and "compensation" in state:
            compensations = flat_pieces(state["compensation"], size)
        pieces = zip(weights, gradients, moments, squares, compensations, strict=True)
        if step:
            for index, piece in enumerate(pieces):
                step.step(*piece, state["step"], group, seed_from(state["number"], state["step"], index))
            return
        generator = self._generators.setdefault(parameter.device, torch.Generator(parameter.device))
        generator.manual_seed(seed_from(state["number"], state["step"]))
        for piece in pieces:
            self._step_chunk(*piece, state["step"], group, generator)

    def _step_chunk(
        self,
        weight: Tensor,
        gradient: Tensor,
        moment: Tensor,
        square: Tensor,
        compensation: Tensor | None,
        step: int,
        group: dict[str, Any],
        generator: torch.Generator,
    ) -> None:
        beta1, beta2 = group["betas"]
        gradient = gradient.float()
        new_moment = moment.float().lerp_(gradient, 1 - beta1)
        new_square = square.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        moment.copy_(round_stochastically(new_moment, generator))
        square.copy_(round_stochastically(new_square, generator))
        denominator = new_square.sqrt_().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        change = new_moment.div_(denominator).mul_(-group["lr"] / (1 - beta1**step))
        master = weight.float() if compensation is None else join(weight, compensation)
        change.add_(master, alpha=-group["lr"] * group["weight_decay"])
        master.add_(change)  # the weight itself if it is fp32
        if compensation is not None:
            rounded, cut_off = split(master)
            weight.copy_(rounded)
            compensation.copy_(cut_off)
        elif weight.dtype == torch.bfloat16:
            weight.copy_(round_stochastically(master, generator))
