"""Inputs of `z2all bench ops`: random tensors with the model's shapes and memory layouts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from z2all_ds.base.config import RunConfig
from z2all_ds.bench.products import WEIGHT_SCALE, Linear, linears_of
from z2all_ds.ops import gradient_sink
from z2all_ds.ops.linear import reference as plain_linear
from z2all_ds.ops.visibility import Visible, document_borders

SHORTEST_DOCUMENT, LONGEST_DOCUMENT = 100, 900
DOCUMENT_SEED = 7
CALLED_BY_LINEAR = ("qkv", "o", "gate_up")
"""The products that the op `linear` computes; the others are part of `swiglu` and `cross_entropy`."""


class _PrecedingOp(Function):
    """Stands for the op that produced the inputs. They are no leaves, so that an op may write over them, as it may in
    the model; their gradients are dropped instead of accumulated."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *made: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.data for tensor in made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        return (None,) * (1 + len(gradients))


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call."""

    activations: tuple[Tensor, ...]
    constants: tuple[Any, ...]
    """The arguments after the activations."""
    gradients: tuple[Tensor, ...]
    """Gradients of the first outputs."""
    weight: nn.Parameter | None = None

    @cached_property
    def _anchor(self) -> Tensor:
        """A tensor that requires a gradient; without one, autograd would not track the activations."""
        return torch.ones((), device=self.activations[0].device, requires_grad=True)

    def forward(self, function: Callable[..., Any]) -> tuple[Any, ...]:
        outputs = function(*_PrecedingOp.apply(self._anchor, *self.activations), *self.constants)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def forward_and_backward(self, function: Callable[..., Any]) -> None:
        outputs = self.forward(function)
        torch.autograd.backward(outputs[: len(self.gradients)], self.gradients)
        if self.weight is not None:
            self.weight.grad = None  # the next gradient would be added to it


@dataclass(frozen=True)
class OpCase:
    """One op at one shape.

    `name` is empty if the op has only one case. `input_bytes`: size of one input set. `make_inputs` takes whether the
    weight has a gradient sink, which only a case with a weight matrix (`has_weight`) can have.
    """

    op: str
    name: str
    input_bytes: int
    make_inputs: Callable[[bool], Inputs]
    has_weight: bool = False


class ModelCases:
    """Cases at the shapes of a run's model, on one device."""

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

        def case(name: str, visible: Visible) -> OpCase:
            def make_inputs(with_sink: bool) -> Inputs:
                q_k_v = [part.transpose(1, 2) for part in self._heads(sum(sizes)).split(sizes, dim=2)]
                return Inputs(tuple(q_k_v), (visible, scale), (self._heads(sizes[0]).transpose(1, 2),))

            return OpCase("attention", name, input_bytes, make_inputs)

        ids_BT = document_ids(self.batch, self.length).to(self.device)
        # The model makes one such object per pass for all its layers, so the mask that it makes is not timed.
        packed = Visible(self.batch, self.length, self.device, document_ids=ids_BT, cu_seqlens=document_borders(ids_BT))
        return [case("causal", Visible(self.batch, self.length, self.device)), case("documents", packed)]

    def _rope(self) -> list[OpCase]:
        heads, kv_heads, size = self.model.num_heads, self.model.num_kv_heads, self.model.head_dim

        def make_inputs(with_sink: bool) -> Inputs:
            angles_BTE = self._random(self.batch, self.length, size // 2, dtype=torch.float32).repeat(1, 1, 2)
            tables = (angles_BTE.cos().to(self.dtype), angles_BTE.sin().to(self.dtype))
            gradients = tuple(self._heads(count).transpose(1, 2) for count in (heads, kv_heads, kv_heads))
            return Inputs((self._heads(heads + 2 * kv_heads),), (heads, kv_heads, *tables), gradients)

        # q and k are read and written, two tables are read; v may stay where it is.
        return [self._case("rope", "", (2 * (heads + kv_heads) + 2) * self.tokens * size, make_inputs)]

    def _rms_norm(self) -> list[OpCase]:
        hidden = self.model.hidden_size
        stream = torch.float32 if self.run.model.residual_in_fp32 else self.dtype

        def make_inputs(with_sink: bool) -> Inputs:
            x, residual = self._random(self.tokens, hidden), self._random(self.tokens, hidden, dtype=stream)
            gradients = (self._random(self.tokens, hidden), self._random(self.tokens, hidden, dtype=stream))
            weight = nn.Parameter(self._random(hidden))
            return Inputs((x, residual), (weight, self.run.model.rms_norm_eps), gradients, weight)

        input_bytes = 2 * self.tokens * hidden * (self.dtype.itemsize + stream.itemsize)
        return [OpCase("rms_norm", "", input_bytes, make_inputs)]

    def _swiglu(self) -> list[OpCase]:
        hidden, inner = self.model.hidden_size, self.model.intermediate_size

        def make_inputs(with_sink: bool) -> Inputs:
            weight = self._weight(hidden, inner, with_sink)
            gate_up = self._random(self.tokens, 2 * inner)
            return Inputs((gate_up,), (weight, None, plain_linear), (self._random(self.tokens, hidden),), weight)

        return [self._case("swiglu", "", hidden * inner + 2 * self.tokens * inner, make_inputs, has_weight=True)]

    def _linear(self) -> list[OpCase]:
        def case(linear: Linear) -> OpCase:
            def make_inputs(with_sink: bool) -> Inputs:
                weight = self._weight(linear.outputs, linear.inputs, with_sink)
                x, dy = self._random(self.tokens, linear.inputs), self._random(self.tokens, linear.outputs)
                return Inputs((x,), (weight, None), (dy,), weight)

            elements = (linear.outputs + self.tokens) * linear.inputs
            return self._case("linear", linear.name, elements, make_inputs, has_weight=True)

        return [case(linear) for linear in linears_of(self.model) if linear.name in CALLED_BY_LINEAR]

    def _cross_entropy(self) -> list[OpCase]:
        hidden, vocabulary = self.model.hidden_size, self.model.vocab_size

        def make_inputs(with_sink: bool) -> Inputs:
            weight = self._weight(vocabulary, hidden, with_sink)
            labels = torch.randint(vocabulary, (self.tokens,), device=self.device)
            share = torch.full((), 1 / self.tokens, device=self.device)
            return Inputs((self._random(self.tokens, hidden),), (weight, labels), (share,), weight)

        return [self._case("cross_entropy", "", (vocabulary + self.tokens) * hidden, make_inputs, has_weight=True)]

    def _case(
        self, op: str, name: str, elements: int, make_inputs: Callable[[bool], Inputs], has_weight: bool = False
    ) -> OpCase:
        return OpCase(op, name, elements * self.dtype.itemsize, make_inputs, has_weight)


def document_ids(batch: int, sequence_length: int) -> Tensor:
    """Return [batch, tokens]: 0, 1, 2 ... in each row.

    Documents have some hundred tokens, the last one is cut; a short row has at least two documents.
    """
    longest = max(1, min(LONGEST_DOCUMENT, sequence_length // 2))
    shortest = min(SHORTEST_DOCUMENT, longest)
    generator = torch.Generator().manual_seed(DOCUMENT_SEED)
    rows = []
    for _ in range(batch):
        lengths: list[int] = []
        while (left := sequence_length - sum(lengths)) > 0:
            lengths.append(min(left, int(torch.randint(shortest, longest + 1, (), generator=generator))))
        rows.append(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)))
    return torch.stack(rows)
