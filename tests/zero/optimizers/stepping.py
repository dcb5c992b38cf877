"""Weights, gradients and fp64 formulas for tests of optimizers."""

import torch
from torch import Tensor

SHAPES = ((7, 13), (13,), (3, 5, 2), (1,))
LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.95), 1e-8, 0.1


def weights_of(dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def groups_of(weights: list[torch.nn.Parameter]) -> list[dict[str, object]]:
    """Return the parameter groups as in training: weight decay only for matrices."""
    return [
        {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": DECAY},
        {"params": [weight for weight in weights if weight.dim() == 1], "weight_decay": 0.0},
    ]


def set_gradients(weights: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight)


def adamw_formula(weight: Tensor, moment: Tensor, square: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one step of AdamW in fp64 with the gradient in `weight.grad`; return (weight, moment, square)."""
    gradient = weight.grad.double()
    decay = DECAY if weight.dim() > 1 else 0.0
    moment = BETAS[0] * moment + (1 - BETAS[0]) * gradient
    square = BETAS[1] * square + (1 - BETAS[1]) * gradient**2
    corrected, root = moment / (1 - BETAS[0] ** step), (square / (1 - BETAS[1] ** step)).sqrt()
    return weight.detach().double() * (1 - LR * decay) - LR * corrected / (root + EPS), moment, square


def lion_formula(weight: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
    gradient = weight.grad.double()
    decay = DECAY if weight.dim() > 1 else 0.0
    direction = (BETAS[0] * moment + (1 - BETAS[0]) * gradient).sign()
    return weight.detach().double() * (1 - LR * decay) - LR * direction, BETAS[1] * moment + (1 - BETAS[1]) * gradient
