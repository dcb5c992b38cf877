"""The three matrix products that a linear layer costs in training, timed at its own shape: y, dx and dW.

In the layouts that autograd uses (y = x W^T, dx = dy W, dW = dy^T x, all row-major), on random data: on zeros a GPU
draws less power, clocks higher, and flatters.
"""

from collections.abc import Iterable
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
        *feed_forward_linears(hidden, shape.intermediate_size, layers),
        head_linear(hidden, shape.vocab_size),
    ]


def feed_forward_linears(hidden: int, intermediate: int, count: int = 1) -> list[Linear]:
    return [Linear("gate_up", hidden, 2 * intermediate, count), Linear("down", intermediate, hidden, count)]


def head_linear(hidden: int, vocabulary: int) -> Linear:
    return Linear("head", hidden, vocabulary)


def training_dtype(device: torch.device, precision: str) -> torch.dtype:
    """bf16 on a GPU unless `train.precision` is fp32; fp32 on a CPU, where bf16 products are some 100 times slower."""
    return torch.bfloat16 if device.type == "cuda" and precision != "fp32" else torch.float32


@dataclass(frozen=True)
class _Tensors:
    """What the three products read, and what they write: fresh memory each, as in training."""

    x_NI: Tensor
    weight_OI: Tensor
    dy_NO: Tensor
    y_NO: Tensor
    dx_NI: Tensor
    dweight_OI: Tensor


@torch.no_grad()
def time_products(
    linear: Linear, tokens: int, device: torch.device, dtype: torch.dtype, budget_ms: float = BUDGET_MS
) -> dict[str, float]:
    """Seconds of one call of each of PRODUCTS."""
    num_sets = sets_needed(_bytes_per_product(linear, tokens, dtype), device)
    sets = [_random_tensors(linear, tokens, device, dtype) for _ in range(num_sets)]
    calls = {
        "forward": rotating(lambda one: torch.mm(one.x_NI, one.weight_OI.t(), out=one.y_NO), sets),
        "input gradient": rotating(lambda one: torch.mm(one.dy_NO, one.weight_OI, out=one.dx_NI), sets),
        "weight gradient": rotating(lambda one: torch.mm(one.dy_NO.t(), one.x_NI, out=one.dweight_OI), sets),
    }
    return {name: time_call(calls[name], device, budget_ms) for name in PRODUCTS}


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


def _random_tensors(linear: Linear, tokens: int, device: torch.device, dtype: torch.dtype) -> _Tensors:
    x_NI = torch.randn(tokens, linear.inputs, device=device, dtype=dtype)
    weight_OI = torch.randn(linear.outputs, linear.inputs, device=device, dtype=dtype).mul_(WEIGHT_SCALE)
    dy_NO = torch.randn(tokens, linear.outputs, device=device, dtype=dtype)
    return _Tensors(
        x_NI, weight_OI, dy_NO, torch.empty_like(dy_NO), torch.empty_like(x_NI), torch.empty_like(weight_OI)
    )
