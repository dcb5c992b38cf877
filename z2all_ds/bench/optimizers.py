"""`z2all bench optimizers`: what each optimizer's state takes and how long it steps, on one flat tensor as under ZeRO.

Bytes are those of the tensors it keeps after a step, counters left out, and what the registry states. Kinds that
cannot run here are listed with their reasons.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from z2all_ds.base.config.sections import OptimizerSection
from z2all_ds.base.console import heartbeat
from z2all_ds.base.errors import Z2allError
from z2all_ds.base.machine import default_environment
from z2all_ds.base.reports import Shown, Table
from z2all_ds.bench.shared import require_at_least
from z2all_ds.bench.timing import device_here, in_words, measured_on, require_memory, time_call
from z2all_ds.zero.op_builds import ops_of_optimizer, prebuild
from z2all_ds.zero.optimizers import KINDS, OptimizerSituation, build_optimizer, choose_optimizer

DEFAULT_PARAMETERS = {"cuda": 200_000_000, "cpu": 10_000_000}
PARAMETERS_MULTIPLE = 256
MIN_PARAMETERS = 4096
"""Fewer are not kept in 8 bits."""
BYTES_NEEDED_PER_PARAMETER = 32
"""Weight, gradient, two moments, and the temporaries of those that have some."""
BUDGET_MS = 500.0


@dataclass(frozen=True)
class OptimizerCost:
    """One optimizer on weights of one dtype (the fp32 master, or bf16 itself); bytes are per parameter."""

    kind: str
    weights: str
    rounding: str | None
    device: str
    state_bytes_stated: float
    state_bytes_measured: float
    milliseconds_per_step: float


@dataclass(frozen=True)
class Refusal:
    kind: str
    reason: str


@dataclass(frozen=True)
class OptimizerCosts:
    """All that can run here, and the others."""

    measured_on: dict[str, str]
    parameters: int
    optimizers: list[OptimizerCost]
    refused: list[Refusal]


def bench_optimizers(parameters: int | None = None) -> OptimizerCosts:
    """Every kind on `parameters` weights (rounded up to a multiple of 256)."""
    device = device_here()
    parameters = DEFAULT_PARAMETERS[device.type] if parameters is None else parameters
    require_at_least(MIN_PARAMETERS, parameters=parameters)
    parameters = -(-parameters // PARAMETERS_MULTIPLE) * PARAMETERS_MULTIPLE
    require_memory(BYTES_NEEDED_PER_PARAMETER * parameters, device, f"stepping {parameters:,} parameters")
    # DeepSpeed's ops are built and found with these; another ninja on PATH would build them again.
    os.environ.update(default_environment(ranks=1))
    costs, refused = [], []
    for section, situation in candidates(device.type):
        refusal = KINDS[section.kind].why_not(situation)
        if refusal is None:
            try:
                costs.append(_measure(section, situation, parameters, device))
                continue
            except (ImportError, RuntimeError, OSError, Z2allError) as error:
                # A library that is there and does not work: the others are measured all the same.
                refusal = f"fails: {' '.join(str(error).split())[:300]}"
        refused.append(Refusal(section.kind, refusal))
    return OptimizerCosts(measured_on(device), parameters, costs, refused)


def candidates(device: str) -> Iterator[tuple[OptimizerSection, OptimizerSituation]]:
    """Each kind where it is at home: ds_cpu_adam offloaded, adamw_bf16 also on bf16 weights."""
    for kind in KINDS:
        offload = kind == "ds_cpu_adam"
        yield OptimizerSection(kind=kind), OptimizerSituation(device, stage=2, offload=offload)
    for rounding in ("kahan", "stochastic"):
        section = OptimizerSection(kind="adamw_bf16", rounding=rounding)
        yield section, OptimizerSituation(device, stage=2, offload=False, bf16_master=True, bf16_states=True)


def _measure(
    section: OptimizerSection, situation: OptimizerSituation, parameters: int, device: torch.device
) -> OptimizerCost:
    choice = choose_optimizer(section, situation)
    home = torch.device("cpu") if situation.offload else device
    dtype = torch.bfloat16 if situation.bf16_master else torch.float32
    weight = torch.nn.Parameter(torch.randn(parameters, device=home, dtype=dtype))
    weight.grad = torch.randn_like(weight)
    prebuild(ops_of_optimizer(section.kind))
    with heartbeat(f"measuring {section.kind}"):
        optimizer = build_optimizer(choice, [{"params": [weight], "weight_decay": section.weight_decay}], section)
        optimizer.step()
        measured = state_bytes(optimizer) / parameters
        seconds = time_call(optimizer.step, home, BUDGET_MS)
    weights, rounding = ("bf16", section.rounding) if situation.bf16_master else ("fp32", None)
    stated = choice.state_bytes_per_parameter
    return OptimizerCost(section.kind, weights, rounding, home.type, stated, measured, 1e3 * seconds)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of all tensors it keeps; those of one number (the count of steps) do not grow with the model."""
    tensors = [tensor for state in optimizer.state.values() for value in state.values() for tensor in _plain(value)]
    distinct = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors if tensor.dim()}
    return sum(distinct.values())


def _plain(value: Any) -> Iterator[torch.Tensor]:
    """A quantised tensor is made of several."""
    if hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


def describe(costs: OptimizerCosts) -> Shown:
    """Yields the device and a table of optimizers; those that cannot run have the reason."""
    yield in_words(costs.measured_on, f"{costs.parameters:,} parameters")
    rows = [[refusal.kind, refusal.reason] for refusal in costs.refused]
    yield Table(("kind", "weights", "state bytes", "stated", "ms/step"), [*map(_cells, costs.optimizers), *rows], "llr")


def _cells(cost: OptimizerCost) -> list[str]:
    weights = " ".join(filter(None, (cost.weights, cost.rounding)))
    figures = (cost.state_bytes_measured, cost.state_bytes_stated, cost.milliseconds_per_step)
    return [cost.kind, weights, *(f"{figure:.2f}" for figure in figures)]
