"""A micro-batch as two CUDA graphs: one launch for the forward pass, one for the backward pass.

A micro-batch of 4096 tokens has about 700 kernels. Launching them one by one took the host of an H200 38 ms, running
them took the GPU 51 ms; replayed, they take the host 3 ms. This requires fixed addresses of weights and gradients
(sinks, `gradient_sinks.py`), inputs copied into fixed buffers, and no gradient passed to autograd, whose hooks would
not be in the graph. So it is limited to ZeRO-1 with fp32 accumulation; otherwise kernels are launched as usual.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from z2all_ds.base.config import RunConfig
from z2all_ds.base.errors import ConfigError
from z2all_ds.model.modeling_z2all import TokenLosses
from z2all_ds.ops import Ops
from z2all_ds.train.speed.graph_conditions import why_no_graphs
from z2all_ds.zero.gradient_sinks import GradientSinks

WARM_UPS = 2
"""Micro-batches run without graphs before a capture, to compile kernels and let libraries plan."""


@dataclass
class _Captured:
    """One pair of graphs and the fixed buffers they read and write."""

    inputs: dict[str, Tensor]
    outputs: TokenLosses
    d_loss: Tensor
    forward_graph: torch.cuda.CUDAGraph
    backward_graph: torch.cuda.CUDAGraph


class _Replay(Function):
    """Represents the whole model in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, captured: _Captured) -> Tensor:
        ctx.captured = captured
        captured.forward_graph.replay()
        assert captured.outputs.loss is not None
        return captured.outputs.loss.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.captured.d_loss.copy_(gradients[0])
        ctx.captured.backward_graph.replay()
        return None, None


class GraphedForward:
    """Replaces a model's `forward` during training."""

    def __init__(self, model: nn.Module, sinks: GradientSinks) -> None:
        self._model, self._sinks = model, sinks
        self._plain_forward = model.forward
        self._captured: dict[tuple[Any, ...], _Captured] = {}
        self._warm: set[tuple[int, ...]] = set()
        self._pool: Any = None
        self.pool_bytes = 0
        """Memory that belongs to the graphs; torch does not count it as allocated."""
        # An input that requires a gradient; otherwise autograd would not run the backward pass.
        self._anchor = torch.zeros((), device=next(model.parameters()).device, requires_grad=True)
        model.forward = self

    def forget(self) -> None:
        """Drop the graphs after a change of the computation (rotary frequencies, length)."""
        self._captured.clear()
        self._warm.clear()
        self._pool = None
        self.pool_bytes = 0

    def __call__(self, **inputs: Any) -> Any:
        if not torch.is_grad_enabled() or inputs.get("next_tokens") is None:
            return self._plain_forward(**inputs)
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        key = tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())
        if key not in self._captured:
            self._captured[key] = self._capture(tensors)
        captured = self._captured[key]
        for name, tensor in tensors.items():
            captured.inputs[name].copy_(tensor, non_blocking=True)
        loss = _Replay.apply(self._anchor, captured)
        return TokenLosses(loss=loss, losses=captured.outputs.losses)

    def _capture(self, tensors: dict[str, Tensor]) -> _Captured:
        inputs = {name: tensor.clone() for name, tensor in tensors.items()}
        shape = tuple(inputs["input_ids"].shape)
        if shape not in self._warm:
            # Shapes change only with stages, at the start of a step, so clearing gradients loses nothing.
            for _ in range(WARM_UPS):
                self._plain_forward(**inputs).loss.backward()
            self._refuse_gradients_outside_sinks()
            self._sinks.clear()
            self._warm.add(shape)
        stream = torch.cuda.current_stream()
        stream.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        reserved_before = torch.cuda.memory_reserved()
        forward_graph, backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # During a capture, CUDA forbids allocations in other threads, but the thread that makes batches pins memory.
        # In thread_local mode only the capturing thread is restricted.
        capture = partial(torch.cuda.graph, stream=stream, capture_error_mode="thread_local")
        with capture(forward_graph, pool=self._pool):
            outputs = self._plain_forward(**inputs)
        self._pool = self._pool or forward_graph.pool()
        d_loss = torch.ones_like(outputs.loss)
        with capture(backward_graph, pool=self._pool):
            outputs.loss.backward(d_loss)
        self.pool_bytes += torch.cuda.memory_reserved() - reserved_before
        torch.cuda.reset_peak_memory_stats()
        # Detached, so that the memory of activations belongs to the graphs only and is shared by the next capture.
        kept = TokenLosses(loss=outputs.loss.detach(), losses=outputs.losses.detach())
        return _Captured(inputs, kept, d_loss, forward_graph, backward_graph)

    def _refuse_gradients_outside_sinks(self) -> None:
        left = [name for name, weight in self._model.named_parameters() if weight.grad is not None]
        if left:
            raise ConfigError(
                "train.cuda_graphs",
                f"with the selected ops, the gradients of {left[0]} and {len(left) - 1} others go through autograd",
                "Set train.cuda_graphs=never, or ops.rms_norm=triton and ops.linear=torch.",
            )


def graph_micro_batches(engine: Any, run: RunConfig, ops: Ops, say: Callable[[str], None]) -> GraphedForward | None:
    """Set up gradient sinks, and capture micro-batches if `train.cuda_graphs` and the run allow it."""
    sinks = GradientSinks(engine)
    backends = {choice.op: choice.backend for choice in ops.choices}
    refusal = why_no_graphs(engine.device.type, run, backends, sinks.active)
    if run.train.cuda_graphs == "always" and refusal:
        raise ConfigError("train.cuda_graphs=always", refusal, "Set train.cuda_graphs=auto.")
    if run.train.cuda_graphs == "never" or refusal:
        if refusal and engine.device.type == "cuda":
            say(f"CUDA graphs: no ({refusal})")
        return None
    say("CUDA graphs: each micro-batch is captured once and replayed")
    return GraphedForward(engine.module, sinks)
