"""`train.compile=layers`: the forward and the backward pass of each decoder layer as one compiled region.

The layer is the largest region that stays whole under every ZeRO stage. DeepSpeed gathers and frees the weights of
ZeRO-3 in hooks around the layer (it is a leaf, see `zero/engine.py`), so inside there is nothing but tensors: no hook,
no collective, no graph break. Hence the order: first `deepspeed.initialize`, then this. One region serves all layers of
one shape, as weights are inputs to it.

Inductor fuses plain torch, so the ops inside are the references by default. A backend of a library can still be asked
for; it then runs between compiled pieces of the layer's halves. Gradient sinks and CUDA graphs belong to the other way
of being fast (`graphed.py`) and stay off.
"""

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from z2all_ds.base.errors import MachineError
from z2all_ds.model.modules import DecoderLayer
from z2all_ds.ops import Ops, Situation, resolve_ops
from z2all_ds.ops.visibility import Visible

TRACED = {
    "attention": ("sdpa", "eager"),
    "rope": ("torch",),
    "rms_norm": ("torch",),
    "swiglu": ("torch",),
    "linear": ("torch",),
}
"""Backends that become part of a region; the first is what `auto` means. Cross-entropy lies behind the layers."""

GRAPHS_PER_SHAPE = 2
"""The first layer has no residual stream yet, the others have."""


def ops_to_compile(wanted: dict[str, str], situation: Situation) -> Ops:
    """`resolve_ops` for compiled layers: `auto` is what can be traced, and what cannot be is kept out of the trace."""
    by_default = {op: names[0] for op, names in TRACED.items() if wanted.get(op, "auto") == "auto"}
    ops = resolve_ops({**wanted, **by_default}, situation)
    choices, outside = [], {}
    for choice in ops.choices:
        if choice.op in by_default:
            choice = replace(choice, reason="train.compile=layers, which fuses it")
        elif choice.op in _outside(ops):
            choice = replace(choice, reason=f"{choice.reason}; runs between compiled pieces of the layer")
            outside[choice.op] = torch.compiler.disable(getattr(ops, choice.op))
        choices.append(choice)
    return replace(ops, **outside, choices=tuple(choices))


def _outside(ops: Ops) -> set[str]:
    """Ops of the layer whose chosen backend is not traced."""
    return {choice.op for choice in ops.choices if choice.op in TRACED and choice.backend not in TRACED[choice.op]}


def require_inductor(device: str) -> None:
    """What torch.compile needs of the machine, said before the model is built and in one line."""
    missing = _what_inductor_misses(device)
    if missing:
        rule, fix = missing
        raise MachineError("train.compile=layers", rule, f"{fix}, or set train.compile=none.")


def _what_inductor_misses(device: str) -> tuple[str, str] | None:
    """(rule, fix) of the first thing that is not there."""
    if device == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "torch.compile writes Triton kernels, and triton is not installed", "Install it: pip install triton"
        compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    else:
        compilers = [os.environ.get("CXX") or "g++"]
    if not any(shutil.which(name) for name in compilers):
        rule = f"torch.compile needs a compiler and finds no {' or '.join(compilers)}"
        return rule, "Install one: `apt install g++` (Debian, Ubuntu) or `dnf install gcc-c++` (RHEL, Fedora)"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        rule = f"what torch.compile writes includes Python.h, and there is no {header}"
        return rule, "Install Python's headers: `apt install python3-dev` or `dnf install python3-devel`"
    return None


def compile_layers(model: nn.Module, ops: Ops, num_shapes: int, say: Callable[[str], None]) -> None:
    """Compiles the layers of a model that DeepSpeed has wrapped; `num_shapes`: how many shapes of batches will come.

    The work itself is done at the first batch of each shape.
    """
    import torch._dynamo

    # Shapes are never dynamic: a run has as many as stages, and kernels for one shape are the faster ones. Dynamo's
    # limit (8) is meant for functions that are compiled again and again by mistake.
    limit = GRAPHS_PER_SHAPE * (num_shapes + 1)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    outside = _outside(ops)
    # torch runs everything inside a checkpointed half as it stands where it cannot trace all of it; so then the halves
    # are the regions, and what checkpoints them stays outside.
    names = ("attention_half", "mlp_half") if outside else ("forward",)
    for layer in model.modules():
        if isinstance(layer, DecoderLayer):
            for name in names:
                setattr(layer, name, _CompiledInTraining(layer, name, ops))
    say("compiling the layers: the first step takes longer")


class _CompiledInTraining:
    """Takes the place of a method of a layer. Evaluation and generation, with their many shapes, run as they stand."""

    def __init__(self, layer: DecoderLayer, name: str, ops: Ops) -> None:
        outside = _outside(ops)
        self._layer, self._plain = layer, getattr(layer, name)
        self._compiled = torch.compile(self._plain, fullgraph=not outside, dynamic=False)
        self._traces_attention = "attention" not in outside

    def __call__(self, *inputs: Any) -> Any:
        if not self._layer.training:
            return self._plain(*inputs)
        if self._traces_attention:
            inputs = tuple(_Mask(value.mask()) if isinstance(value, Visible) else value for value in inputs)
        return self._compiled(*inputs)


@dataclass(frozen=True)
class _Mask:
    """What the traced backends read of `Visible`, made before the region.

    Made inside, the first layer's region would differ from the others', and from itself when activation checkpointing
    runs it again; and borders of documents, whose number changes with every batch, would each time be a new shape.
    """

    made: Tensor | None

    def mask(self) -> Tensor | None:
        return self.made
