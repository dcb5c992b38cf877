"""`z2all bench optimizers`: state size, temporary memory and step time of each optimizer, on a flat tensor as in ZeRO.

State bytes are those of the tensors that an optimizer keeps after a step, without counters. Step bytes, measured on a
GPU, are the peak of what a step allocates besides. Both are compared with the bytes that the registry states.
Optimizers that cannot run here are listed with the reason.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch

from z2all_ds.base.config.sections import OptimizerSection
from z2all_ds.base.console import heartbeat
from z2all_ds.base.errors import Z2allError
from z2all_ds.base.machine import default_environment
from z2all_ds.base.reports import Shown, Table
from z2all_ds.bench.shared import Report, require_at_least
from z2all_ds.bench.timing import device_here, head_line, measured_on, require_memory, time_call
from z2all_ds.zero.op_builds import ops_of_optimizer, prebuild
from z2all_ds.zero.optimizers import KINDS, OptimizerSituation, build_optimizer, choose_optimizer

DEFAULT_PARAMETERS = {"cuda": 200_000_000, "cpu": 10_000_000}
PARAMETERS_MULTIPLE = 256
MIN_PARAMETERS = 4096
"""Smaller tensors are not kept in 8 bits."""
BYTES_NEEDED_PER_PARAMETER = 32
"""Weight, gradient, two moments, and temporary tensors."""
BUDGET_MS = 500.0
FIGURES = (
    *("state_bytes_measured", "state_bytes_stated"),
    *("step_bytes_measured", "step_bytes_stated", "milliseconds_per_step"),
)


def bench_optimizers(parameters: int | None = None) -> Report:
    """Measure every optimizer on `parameters` weights (rounded up to a multiple of 256)."""
    device = device_here()
    parameters = DEFAULT_PARAMETERS[device.type] if parameters is None else parameters
    require_at_least(MIN_PARAMETERS, parameters=parameters)
    parameters = -(-parameters // PARAMETERS_MULTIPLE) * PARAMETERS_MULTIPLE
    require_memory(BYTES_NEEDED_PER_PARAMETER * parameters, device, f"stepping {parameters:,} parameters")
    # DeepSpeed builds and finds its ops with these; with another ninja on PATH it would build them again.
    os.environ.update(default_environment(ranks=1))
    costs, refused = [], []
    for section, situation in candidates(device.type):
        refusal = KINDS[section.kind].why_not(situation)
        if refusal is None:
            try:
                costs.append(_measure(section, situation, parameters, device))
                continue
            except (ImportError, RuntimeError, OSError, Z2allError) as error:
                # The library is installed but does not work; the other optimizers are still measured.
                refusal = f"fails: {' '.join(str(error).split())[:300]}"
        refused.append({"kind": section.kind, "reason": refusal})
    return {
        "measured_on": measured_on(device),
        "parameters": parameters,
        "optimizers": costs,
        "refused": refused,
    }


def candidates(device: str) -> Iterator[tuple[OptimizerSection, OptimizerSituation]]:
    """Yield every optimizer in its usual setting: ds_cpu_adam offloaded, adamw_bf16 also on bf16 weights."""
    for kind in KINDS:
        offload = kind == "ds_cpu_adam"
        yield OptimizerSection(kind=kind), OptimizerSituation(device, stage=2, offload=offload)
    for rounding in ("kahan", "stochastic"):
        section = OptimizerSection(kind="adamw_bf16", rounding=rounding)
        yield section, OptimizerSituation(device, stage=2, offload=False, bf16_master=True, bf16_states=True)


def _measure(section: OptimizerSection, situation: OptimizerSituation, parameters: int, device: torch.device) -> Report:
    """Measure one optimizer on weights of one dtype (the fp32 master, or bf16 itself). Bytes are per parameter."""
    choice = choose_optimizer(section, situation)
    state_device = torch.device("cpu") if situation.offload else device
    dtype = torch.bfloat16 if situation.bf16_master else torch.float32
    weight = torch.nn.Parameter(torch.randn(parameters, device=state_device, dtype=dtype))
    weight.grad = torch.randn_like(weight)
    prebuild(ops_of_optimizer(section.kind))
    with heartbeat(f"measuring {section.kind}"):
        optimizer = build_optimizer(choice, [{"params": [weight], "weight_decay": section.weight_decay}], section)
        optimizer.step()
        measured, in_step = state_bytes(optimizer) / parameters, step_bytes(optimizer, state_device)
        seconds = time_call(optimizer.step, state_device, BUDGET_MS)
    return {
        "kind": section.kind,
        "weights": "bf16" if situation.bf16_master else "fp32",
        "rounding": section.rounding if situation.bf16_master else None,
        "device": state_device.type,
        "state_bytes_stated": choice.state_bytes_per_parameter,
        "state_bytes_measured": measured,
        "step_bytes_stated": choice.step_bytes_per_parameter,
        "step_bytes_measured": None if in_step is None else in_step / parameters,
        "milliseconds_per_step": 1e3 * seconds,
    }


def step_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int | None:
    """Return the peak of the memory that a step allocates; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    optimizer.step()
    return torch.cuda.max_memory_allocated(device) - before


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all state tensors, except scalars (step counts), which do not grow with the model."""
    tensors = [tensor for state in optimizer.state.values() for value in state.values() for tensor in _plain(value)]
    distinct = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors if tensor.dim()}
    return sum(distinct.values())


def _plain(value: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor, or the tensors that a quantized tensor consists of."""
    if hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


def describe(report: Report) -> Shown:
    """Yield the device and a table of optimizers; those that cannot run have the reason."""
    yield head_line(report["measured_on"], f"{report['parameters']:,} parameters")
    rows = []
    for one in report["optimizers"]:
        figures = (one[name] for name in FIGURES)
        weights = " ".join(filter(None, (one["weights"], one["rounding"])))
        rows.append([one["kind"], weights, *("-" if figure is None else f"{figure:.2f}" for figure in figures)])
    rows += [[refusal["kind"], refusal["reason"]] for refusal in report["refused"]]
    yield Table(("kind", "weights", "state bytes", "stated", "step bytes", "stated", "ms/step"), rows, "llr")
