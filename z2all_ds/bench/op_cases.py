"""What `z2all bench ops` hands to the ops: random tensors at the model's shapes, laid out as the model lays them out.

Each case knows the work it cannot do without. For ops that multiply these are floating-point operations, two for a
multiply-add, nothing computed a second time counted; for the others the bytes that must be read and written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from z2all_ds.base.config import RunConfig
from z2all_ds.bench.floor import attention_flops
from z2all_ds.bench.products import WEIGHT_SCALE, Linear, linears_of
from z2all_ds.ops import gradient_sink
from z2all_ds.ops.linear import reference as plain_linear
from z2all_ds.ops.visibility import Visible, document_borders

SHORTEST_DOCUMENT, LONGEST_DOCUMENT = 100, 900
DOCUMENT_SEED = 7
BYTES, FLOPS = "GB/s", "TFLOP/s"
CALLED_BY_LINEAR = ("qkv", "o", "gate_up")
"""The products of a layer that the op `linear` computes; those of `swiglu` and `cross_entropy` are inside these."""


class _OpBefore(Function):
    """Stands for whatever made an op's inputs. They are no leaves, so that the op may write over them, as it may in the
    model; and their gradients are dropped, not added up."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *made: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.data for tensor in made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        return (None,) * (1 + len(gradients))


@dataclass(frozen=True)
class Inputs:
    """One set of tensors for a call."""

    activations: tuple[Tensor, ...]
    constants: tuple[Any, ...]
    """The arguments after the activations."""
    gradients: tuple[Tensor, ...]
    """Of the first outputs."""
    weight: nn.Parameter | None = None

    @cached_property
    def _anchor(self) -> Tensor:
        """Something that requires a gradient, or autograd would not follow the activations."""
        return torch.ones((), device=self.activations[0].device, requires_grad=True)

    def forward(self, function: Callable[..., Any]) -> tuple[Any, ...]:
        outputs = function(*_OpBefore.apply(self._anchor, *self.activations), *self.constants)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def forward_and_backward(self, function: Callable[..., Any]) -> None:
        outputs = self.forward(function)
        torch.autograd.backward(outputs[: len(self.gradients)], self.gradients)
        if self.weight is not None:
            self.weight.grad = None  # or the next one would be added to it


@dataclass(frozen=True)
class OpCase:
    """One op at one shape.

    `name` tells it from the op's other cases and is empty where there is one. `unit` is BYTES or FLOPS, of the work.
    `input_bytes` are those of one set. `make_inputs` gets whether the weight has a gradient sink, which only
    a case with a weight matrix (`has_weight`) can have.
    """

    op: str
    name: str
    unit: str
    forward_work: int
    backward_work: int
    input_bytes: int
    make_inputs: Callable[[bool], Inputs]
    has_weight: bool = False


class Shapes:
    """The model's sizes on a device, and cases made of them."""

    def __init__(self, run: RunConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.run, self.device, self.dtype = run, device, dtype
        self.model = run.model.shape
        self.batch, self.length = run.train.micro_batch, run.train.sequence_length
        self.tokens = self.batch * self.length

    def cases(self, op: str) -> list[OpCase]:
        make: Callable[[], list[OpCase]] = getattr(self, f"_{op}")
        return make()

    def _random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def _weight(self, outputs: int, inputs: int, with_sink: bool) -> nn.Parameter:
        weight = nn.Parameter(self._random(outputs, inputs).mul_(WEIGHT_SCALE))
        if with_sink:
            gradient_sink.attach(weight, torch.zeros_like(weight, dtype=torch.float32))
        return weight

    def _heads(self, count: int) -> Tensor:
        return self._random(self.batch, self.length, count, self.model.head_dim)

    def _attention(self) -> list[OpCase]:
        sizes = [self.model.num_heads, self.model.num_kv_heads, self.model.num_kv_heads]
        scale = self.model.head_dim**-0.5
        input_bytes = self.tokens * (sum(sizes) + sizes[0]) * self.model.head_dim * self.dtype.itemsize

        def case(name: str, visible: Visible, forward_flops: int) -> OpCase:
            def make_inputs(with_sink: bool) -> Inputs:
                q_k_v = [part.transpose(1, 2) for part in self._heads(sum(sizes)).split(sizes, dim=2)]
                return Inputs(tuple(q_k_v), (visible, scale), (self._heads(sizes[0]).transpose(1, 2),))

            return OpCase("attention", name, FLOPS, forward_flops, 2 * forward_flops, input_bytes, make_inputs)

        causal = attention_flops(self.model, self.tokens, self.length)["forward"]
        lengths = document_lengths(self.batch, self.length)
        ids_BT = document_ids(lengths, self.length).to(self.device)
        # The model makes one such object a pass for all its layers, so what it makes itself (a mask) is not timed.
        packed = Visible(self.batch, self.length, self.device, document_ids=ids_BT, cu_seqlens=document_borders(ids_BT))
        # As many operations as the causal half of each document on its own.
        inside = sum(attention_flops(self.model, length, length)["forward"] for row in lengths for length in row)
        return [
            case("causal", Visible(self.batch, self.length, self.device), causal),
            case("documents", packed, inside),
        ]

    def _rope(self) -> list[OpCase]:
        heads, kv_heads, size = self.model.num_heads, self.model.num_kv_heads, self.model.head_dim
        table_bytes = 2 * self.tokens * size * self.dtype.itemsize
        head_bytes = self.tokens * size * self.dtype.itemsize

        def make_inputs(with_sink: bool) -> Inputs:
            angles_BTE = self._random(self.batch, self.length, size // 2, dtype=torch.float32).repeat(1, 1, 2)
            tables = (angles_BTE.cos().to(self.dtype), angles_BTE.sin().to(self.dtype))
            gradients = tuple(self._heads(count).transpose(1, 2) for count in (heads, kv_heads, kv_heads))
            return Inputs((self._heads(heads + 2 * kv_heads),), (heads, kv_heads, *tables), gradients)

        # Forward, v may stay where it is. Backward, one fused gradient is made of three.
        forward = 2 * (heads + kv_heads) * head_bytes + table_bytes
        backward = 2 * (heads + 2 * kv_heads) * head_bytes + table_bytes
        return [OpCase("rope", "", BYTES, forward, backward, forward, make_inputs)]

    def _rms_norm(self) -> list[OpCase]:
        hidden = self.model.hidden_size
        stream = torch.float32 if self.run.model.residual_in_fp32 else self.dtype

        def make_inputs(with_sink: bool) -> Inputs:
            x, residual = self._random(self.tokens, hidden), self._random(self.tokens, hidden, dtype=stream)
            gradients = (self._random(self.tokens, hidden), self._random(self.tokens, hidden, dtype=stream))
            weight = nn.Parameter(self._random(hidden))
            return Inputs((x, residual), (weight, self.run.model.rms_norm_eps), gradients, weight)

        # Read x and residual, write normed and stream; read both gradients and the stream, write the gradient of the
        # sum: where x has the stream's dtype it is that of both.
        narrow, wide = (self.tokens * hidden * dtype.itemsize for dtype in (self.dtype, stream))
        backward = narrow + 3 * wide + (narrow if stream != self.dtype else 0)
        return [OpCase("rms_norm", "", BYTES, 2 * narrow + 2 * wide, backward, 2 * (narrow + wide), make_inputs)]

    def _swiglu(self) -> list[OpCase]:
        hidden, inner = self.model.hidden_size, self.model.intermediate_size

        def make_inputs(with_sink: bool) -> Inputs:
            weight = self._weight(hidden, inner, with_sink)
            gate_up = self._random(self.tokens, 2 * inner)
            return Inputs((gate_up,), (weight, None, plain_linear), (self._random(self.tokens, hidden),), weight)

        return [self._product("swiglu", "", Linear("down", inner, hidden), make_inputs, self.tokens * inner)]

    def _linear(self) -> list[OpCase]:
        def case(linear: Linear) -> OpCase:
            def make_inputs(with_sink: bool) -> Inputs:
                weight = self._weight(linear.outputs, linear.inputs, with_sink)
                x, dy = self._random(self.tokens, linear.inputs), self._random(self.tokens, linear.outputs)
                return Inputs((x,), (weight, None), (dy,), weight)

            return self._product("linear", linear.name, linear, make_inputs)

        return [case(linear) for linear in linears_of(self.model) if linear.name in CALLED_BY_LINEAR]

    def _cross_entropy(self) -> list[OpCase]:
        hidden, vocabulary = self.model.hidden_size, self.model.vocab_size

        def make_inputs(with_sink: bool) -> Inputs:
            weight = self._weight(vocabulary, hidden, with_sink)
            labels = torch.randint(vocabulary, (self.tokens,), device=self.device)
            share = torch.full((), 1 / self.tokens, device=self.device)
            return Inputs((self._random(self.tokens, hidden),), (weight, labels), (share,), weight)

        return [self._product("cross_entropy", "", Linear("head", hidden, vocabulary), make_inputs)]

    def _product(
        self, op: str, name: str, linear: Linear, make_inputs: Callable[[bool], Inputs], more_elements: int = 0
    ) -> OpCase:
        """For ops around one matrix product; the backward pass has two."""
        flops = linear.flops_per_product(self.tokens)
        elements = linear.inputs * linear.outputs + self.tokens * linear.inputs + more_elements
        return OpCase(op, name, FLOPS, flops, 2 * flops, elements * self.dtype.itemsize, make_inputs, has_weight=True)


def document_lengths(batch: int, sequence_length: int) -> list[list[int]]:
    """Row by row: documents of some hundred tokens, the last one cut; at least two a row, where a row is short."""
    longest = max(1, min(LONGEST_DOCUMENT, sequence_length // 2))
    shortest = min(SHORTEST_DOCUMENT, longest)
    generator = torch.Generator().manual_seed(DOCUMENT_SEED)
    rows = []
    for _ in range(batch):
        lengths: list[int] = []
        while (left := sequence_length - sum(lengths)) > 0:
            lengths.append(min(left, int(torch.randint(shortest, longest + 1, (), generator=generator))))
        rows.append(lengths)
    return rows


def document_ids(lengths: list[list[int]], sequence_length: int) -> Tensor:
    """[batch, tokens]: 0, 1, 2 ... in each row."""
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    assert all(len(row) == sequence_length for row in rows)
    return torch.stack(rows)
