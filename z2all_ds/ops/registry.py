"""Named backends per op, chosen explicitly or by `auto`, each refusal with its reason.

A backend is a function plus a `why_not(situation)` that returns None when it can run and one line when it cannot.
`auto` takes the first backend in the order of registration that can run and is not `by_request`; so the reference,
which always can, stands last in each file. Nothing is patched globally: the model holds the functions it was given.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from z2all_ds.base.errors import ConfigError

OP_NAMES = ("attention", "rope", "rms_norm", "swiglu", "linear", "cross_entropy")


@dataclass(frozen=True)
class Situation:
    """What a backend must know to say whether it can run."""

    device: str
    """`cpu` or `cuda`."""
    dtype: str
    """Compute dtype: `fp32`, `bf16` or `fp16`."""
    head_dim: int


@dataclass(frozen=True)
class Backend:
    """One way to compute one op."""

    op: str
    name: str
    function: Callable[..., Any]
    why_not: Callable[[Situation], str | None]
    by_request: bool = False
    """`auto` passes it over: it trades something away, or is slower than another."""


@dataclass(frozen=True)
class OpChoice:
    """Which backend runs and why; one row of the table printed at the start."""

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
    """The reference runs everywhere."""
    return None


def backend(
    op: str, name: str, why_not: Callable[[Situation], str | None] = always, by_request: bool = False
) -> Callable[..., Any]:
    """Registers the decorated function as backend `name` of `op`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in _BACKENDS[op], f"backend {name} of {op} registered twice"
        _BACKENDS[op][name] = Backend(op, name, function, why_not, by_request)
        return function

    return register


def needs_library(module: str, package: str) -> Callable[[Situation], str | None]:
    """A `why_not` for GPU kernels of an optional package, imported only when the backend is looked at."""

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
    """All backends of an op, the op's file imported on first use."""
    importlib.import_module(f"z2all_ds.ops.{op}")
    return _BACKENDS[op]


def choose(op: str, wanted: str, situation: Situation) -> tuple[Backend, OpChoice]:
    """The wanted backend, or the first able one for `auto`; a forced backend that cannot run is an error."""
    known = backends_of(op)
    if wanted != "auto":
        if wanted not in known:
            raise ConfigError(f"ops.{op}={wanted}", "no such backend", f"Known: auto, {', '.join(known)}.")
        refusal = known[wanted].why_not(situation)
        if refusal:
            others = ", ".join(name for name in ("auto", *known) if name != wanted)
            raise ConfigError(f"ops.{op}={wanted}", refusal, f"Use ops.{op}= one of {others}.")
        return known[wanted], OpChoice(op, wanted, "asked for")
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
    """One function per op, and the reasons."""
    chosen = {op: choose(op, wanted.get(op, "auto"), situation) for op in OP_NAMES}
    functions = {op: found.function for op, (found, _) in chosen.items()}
    return Ops(**functions, choices=tuple(choice for _, choice in chosen.values()))
