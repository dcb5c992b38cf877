"""The three matrix products that a linear layer costs in training, timed at its own shape: y, dx and dW.

In the layouts that autograd uses (y = x W^T, dx = dy W, dW = dy^T x, all row-major), on random data: on zeros a GPU
draws less power, clocks higher, and flatters.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from z2all_ds.base.accounting import ModelShape
from z2all_ds.bench.timing import BUDGET_MS, require_memory, rotating, sets_needed, time_call

PRODUCTS = ("forward", "input gradient", "weight gradient")
WEIGHT_SCALE = 0.02


@dataclass(frozen=True)
class Linear:
    """One linear layer; `count` of them are in the model."""

    name: str
    inputs: int
    outputs: int
    count: int = 1

    def flops_per_product(self, tokens: int) -> int:
        """Each of the three multiplies the same three sizes."""
        return 2 * tokens * self.inputs * self.outputs


def linears_of(shape: ModelShape) -> list[Linear]:
    """As the model has them: one product for q, k and v, one for gate and up."""
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
    """bf16 on a GPU unless `train.precision` is fp32; fp32 on a CPU, where bf16 products are some 100 times slower."""
    return torch.bfloat16 if device.type == "cuda" and precision != "fp32" else torch.float32


@torch.no_grad()
def time_products(
    linear: Linear, tokens: int, device: torch.device, dtype: torch.dtype, budget_ms: float = BUDGET_MS
) -> dict[str, float]:
    """Seconds of one call of each of PRODUCTS."""
    num_sets = sets_needed(_bytes_per_product(linear, tokens, dtype), device)
    sizes = ((tokens, linear.inputs), (linear.outputs, linear.inputs), (tokens, linear.outputs))
    sets = [
        # x, weight and dy; then what the products write: memory of its own for each, as in training.
        [torch.randn(size, device=device, dtype=dtype) for size in sizes]
        + [torch.empty(size, device=device, dtype=dtype) for size in sizes]
        for _ in range(num_sets)
    ]
    for _, weight, *_ in sets:
        weight.mul_(WEIGHT_SCALE)
    products: dict[str, Callable[[list[Tensor]], Tensor]] = {
        "forward": lambda one: torch.mm(one[0], one[1].t(), out=one[5]),
        "input gradient": lambda one: torch.mm(one[2], one[1], out=one[3]),
        "weight gradient": lambda one: torch.mm(one[2].t(), one[0], out=one[4]),
    }
    return {name: time_call(rotating(products[name], sets), device, budget_ms) for name in PRODUCTS}


def require_room(linears: Iterable[Linear], tokens: int, device: torch.device, dtype: torch.dtype) -> None:
    """Fails with one line, before anything is measured, where one of them needs more memory than is free."""
    for linear in linears:
        bytes_per_product = _bytes_per_product(linear, tokens, dtype)
        bytes_needed = 2 * sets_needed(bytes_per_product, device) * bytes_per_product
        what = f"{linear.name} ({tokens} tokens, {linear.inputs} to {linear.outputs})"
        require_memory(bytes_needed, device, what)


def _bytes_per_product(linear: Linear, tokens: int, dtype: torch.dtype) -> int:
    """Read and written; the same for all three."""
    elements = tokens * linear.inputs + linear.outputs * linear.inputs + tokens * linear.outputs
    return elements * dtype.itemsize
