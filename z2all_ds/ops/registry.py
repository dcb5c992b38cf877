"""Named backends per op, selected explicitly or by `auto`, each refusal with its reason.

A backend is a function plus a `why_not(situation)` that returns None if it can run and a one-line reason if not. `auto`
selects the first registered backend that can run and is not `by_request`; so the reference, which always can, is last
in each file. Nothing is patched globally: the model holds the functions it was given.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from z2all_ds.base.errors import ConfigError

OP_NAMES = ("attention", "rope", "rms_norm", "swiglu", "linear", "cross_entropy")


@dataclass(frozen=True)
class Situation:
    """The facts that decide whether a backend can run."""

    device: str
    """`cpu` or `cuda`."""
    dtype: str
    """Compute dtype: `fp32`, `bf16` or `fp16`."""
    head_dim: int


@dataclass(frozen=True)
class Backend:
    """One implementation of one op."""

    op: str
    name: str
    function: Callable[..., Any]
    why_not: Callable[[Situation], str | None]
    by_request: bool = False
    """Not selected by `auto`: it has a trade-off, or is slower than another."""


@dataclass(frozen=True)
class OpChoice:
    """The selected backend and the reason; one row of the table printed at startup."""

    op: str
    backend: str
    reason: str


@dataclass(frozen=True)
class Ops:
    """The functions a model calls."""

    attention: Callable[..., Any]
    rope: Callable[..., Any]
    rms_norm: Callable[..., Any]
    swiglu: Callable[..., Any]
    linear: Callable[..., Any]
    cross_entropy: Callable[..., Any]
    choices: tuple[OpChoice, ...] = field(default=(), compare=False)


_BACKENDS: dict[str, dict[str, Backend]] = {op: {} for op in OP_NAMES}


def always(situation: Situation) -> str | None:
    """`why_not` of references, which run everywhere."""
    return None


def backend(
    op: str, name: str, why_not: Callable[[Situation], str | None] = always, by_request: bool = False
) -> Callable[..., Any]:
    """Register the decorated function as backend `name` of `op`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in _BACKENDS[op], f"backend {name} of {op} registered twice"
        _BACKENDS[op][name] = Backend(op, name, function, why_not, by_request)
        return function

    return register


def needs_library(module: str, package: str) -> Callable[[Situation], str | None]:
    """Return a `why_not` for GPU kernels of an optional package, imported only when the backend is considered."""

    def why_not(situation: Situation) -> str | None:
        if situation.device != "cuda":
            return f"needs a GPU, the model is on {situation.device}"
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"cannot import {package} ({error}); pip install 'z2all_ds[gpu]'"
        return None

    return why_not


def backends_of(op: str) -> dict[str, Backend]:
    """Return all backends of an op; its module is imported on first use."""
    importlib.import_module(f"z2all_ds.ops.{op}")
    return _BACKENDS[op]


def choose(op: str, wanted: str, situation: Situation) -> tuple[Backend, OpChoice]:
    """Return the wanted backend, or for `auto` the first that can run; a requested backend that cannot run raises."""
    known = backends_of(op)
    if wanted != "auto":
        if wanted not in known:
            raise ConfigError(f"ops.{op}={wanted}", "no such backend", f"Known: auto, {', '.join(known)}.")
        refusal = known[wanted].why_not(situation)
        if refusal:
            others = ", ".join(name for name in ("auto", *known) if name != wanted)
            raise ConfigError(f"ops.{op}={wanted}", refusal, f"Use ops.{op}= one of {others}.")
        return known[wanted], OpChoice(op, wanted, "requested")
    refused: list[str] = []
    for candidate in known.values():
        if candidate.by_request:
            continue
        refusal = candidate.why_not(situation)
        if refusal is None:
            reason = "; ".join(refused) if refused else "first choice"
            return candidate, OpChoice(op, candidate.name, reason)
        refused.append(f"{candidate.name}: {refusal}")
    raise AssertionError(f"the reference backend of {op} must always run")


def resolve_ops(wanted: dict[str, str], situation: Situation) -> Ops:
    """Select one function per op, with the reasons."""
    chosen = {op: choose(op, wanted.get(op, "auto"), situation) for op in OP_NAMES}
    functions = {op: found.function for op, (found, _) in chosen.items()}
    return Ops(**functions, choices=tuple(choice for _, choice in chosen.values()))
