"""Times the three matrix products of a linear layer in training: y, dx and dW.

They have the layouts that autograd uses (y = x W^T, dx = dy W, dW = dy^T x, all row-major) and random data: on zeros a
GPU draws less power and clocks higher.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from z2all_ds.base.accounting import ModelShape
from z2all_ds.bench.timing import require_memory, rotating, sets_needed, time_call

PRODUCTS = ("forward", "input gradient", "weight gradient")
WEIGHT_SCALE = 0.02


@dataclass(frozen=True)
class Linear:
    """A linear layer that occurs `count` times in the model."""

    name: str
    inputs: int
    outputs: int
    count: int = 1

    def flops_per_product(self, tokens: int) -> int:
        """Return the operations of one product; all three multiply the same sizes."""
        return 2 * tokens * self.inputs * self.outputs

    def bytes_per_product(self, tokens: int, dtype: torch.dtype) -> int:
        """Return the bytes that one product reads and writes; the same for all three."""
        elements = tokens * self.inputs + self.outputs * self.inputs + tokens * self.outputs
        return elements * dtype.itemsize


def linears_of(shape: ModelShape) -> list[Linear]:
    """Return the model's linear layers; q, k and v are one product, and so are gate and up."""
    layers, hidden = shape.num_layers, shape.hidden_size
    qkv = shape.attention_width + 2 * shape.num_kv_heads * shape.head_dim
    return [
        Linear("qkv", hidden, qkv, layers),
        Linear("o", shape.attention_width, hidden, layers),
        Linear("gate_up", hidden, 2 * shape.intermediate_size, layers),
        Linear("down", shape.intermediate_size, hidden, layers),
        Linear("head", hidden, shape.vocab_size),
    ]


def training_dtype(device: torch.device, precision: str) -> torch.dtype:
    """Return bf16 on a GPU unless `train.precision` is fp32; fp32 on a CPU, where bf16 is about 100 times slower."""
    return torch.bfloat16 if device.type == "cuda" and precision != "fp32" else torch.float32


@torch.no_grad()
def time_products(linear: Linear, tokens: int, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return the seconds of one call of each of PRODUCTS."""
    sizes = ((tokens, linear.inputs), (linear.outputs, linear.inputs), (tokens, linear.outputs))
    sets = [
        # x, weight and dy; then the outputs: separate memory for each, as in training.
        [torch.randn(size, device=device, dtype=dtype) for size in sizes]
        + [torch.empty(size, device=device, dtype=dtype) for size in sizes]
        for _ in range(sets_needed(linear.bytes_per_product(tokens, dtype), device))
    ]
    for _, weight, *_ in sets:
        weight.mul_(WEIGHT_SCALE)
    products: dict[str, Callable[[list[Tensor]], Tensor]] = {
        "forward": lambda one: torch.mm(one[0], one[1].t(), out=one[5]),
        "input gradient": lambda one: torch.mm(one[2], one[1], out=one[3]),
        "weight gradient": lambda one: torch.mm(one[2].t(), one[0], out=one[4]),
    }
    return {name: time_call(rotating(products[name], sets), device) for name in PRODUCTS}


def require_room(linears: Iterable[Linear], tokens: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raise MachineError, before anything is measured, if a layer needs more memory than is free."""
    for linear in linears:
        size = linear.bytes_per_product(tokens, dtype)
        what = f"{linear.name} ({tokens} tokens, {linear.inputs} to {linear.outputs})"
        require_memory(2 * sets_needed(size, device) * size, device, what)
