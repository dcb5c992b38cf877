"""The plan as a table: one row per ZeRO JSON, what is left of the GPU, and under it everything that was assumed."""

import json
from dataclasses import asdict, dataclass
from typing import TextIO

from z2all_ds.errors import ConfigError
from z2all_ds.plan.memory import ModelStates, zero_states

_CHOICES: tuple[tuple[str, int, bool], ...] = (
    ("zero0", 0, False),
    ("zero1", 1, False),
    ("zero2", 2, False),
    ("zero3", 3, False),
    ("zero2_offload", 2, True),
    ("zero3_offload", 3, True),
)
"""Name of the DeepSpeed JSON, its stage, and whether the optimizer is offloaded; least communication first."""


@dataclass(frozen=True)
class PlanRow:
    """What one ZeRO JSON needs."""

    name: str
    """The JSON's name in ds_configs/."""
    stage: int
    offload_optimizer: bool
    states: ModelStates
    bytes_left: int | None
    """GPU memory left for what is not counted: negative when the states alone do not fit, None if none was given."""

    @property
    def states_fit(self) -> bool | None:
        return None if self.bytes_left is None else self.bytes_left > 0


@dataclass(frozen=True)
class Plan:
    """The rows with the question they answer and the assumptions they rest on."""

    parameters: int
    num_gpus: int
    gpu_memory_bytes: int | None
    compute_dtype: str
    accumulation_dtype: str
    rows: tuple[PlanRow, ...]
    assumptions: tuple[str, ...]


def plan_table(
    parameters: int,
    num_gpus: int,
    gpu_memory_bytes: int | None = None,
    compute_dtype: str = "bf16",
    accumulation_dtype: str | None = None,
) -> Plan:
    """Every ZeRO choice that DeepSpeed accepts for these dtypes, with the GPU memory each leaves free."""
    if gpu_memory_bytes is not None and gpu_memory_bytes < 1:
        raise ConfigError(f"GPU memory = {gpu_memory_bytes} bytes", "must be more than zero", "Give a size like 80GB.")
    refuses_stage_0 = compute_dtype == "bf16" and accumulation_dtype == "fp32"
    rows = []
    for name, stage, offload in _CHOICES:
        if stage == 0 and refuses_stage_0:
            continue
        states = zero_states(parameters, num_gpus, stage, compute_dtype, accumulation_dtype, offload)
        left = None if gpu_memory_bytes is None else gpu_memory_bytes - states.gpu
        rows.append(PlanRow(name, stage, offload, states, left))
    assumptions = _assumptions(rows, num_gpus, gpu_memory_bytes, compute_dtype, accumulation_dtype)
    return Plan(
        parameters=parameters,
        num_gpus=num_gpus,
        gpu_memory_bytes=gpu_memory_bytes,
        compute_dtype=compute_dtype,
        accumulation_dtype=accumulation_dtype or compute_dtype,
        rows=tuple(rows),
        assumptions=assumptions,
    )


def _assumptions(
    rows: list[PlanRow], num_gpus: int, gpu_memory_bytes: int | None, compute_dtype: str, accumulation_dtype: str | None
) -> tuple[str, ...]:
    told = [
        "NOT counted yet: activations, logits, communication buckets, buffers, fragmentation and the CUDA context. "
        "A row that fits here can still run out of memory.",
        _left_over(rows, gpu_memory_bytes),
        "GB are 10^9 bytes. Cards are sold in loose units: give the number that nvidia-smi shows, as MiB.",
        "Adam with fp32 moments (8 bytes a parameter) and fp32 master weights (4).",
        f"Weights and gradients in {compute_dtype}; gradients accumulated in {accumulation_dtype or compute_dtype}.",
        f"All {num_gpus} GPUs are data-parallel ranks and hold equal shares; padding is not counted.",
        "With offload the host numbers are per GPU process; pinned copies and buffers there are not counted.",
    ]
    if compute_dtype == "fp32":
        told.append("In fp32, stages 1 and 2 still keep a copy of their partition as master weights; 0 and 3 do not.")
    if rows[0].stage != 0:
        told.append("zero0 is left out: DeepSpeed refuses bf16 with fp32 accumulation at stage 0.")
    return tuple(told)


def _left_over(rows: list[PlanRow], gpu_memory_bytes: int | None) -> str:
    if gpu_memory_bytes is None:
        return "No GPU memory was given, so what is left for the uncounted parts is not known."
    fitting = [row for row in rows if row.states_fit]
    given = f"Of the {_gigabytes(gpu_memory_bytes)} GB given per GPU"
    too_large = ", ".join(row.name for row in rows if not row.states_fit)
    if not fitting:
        return f"{given}, nothing is left for the uncounted parts: the states alone are larger under every choice."
    left = ", ".join(f"{_gigabytes(row.bytes_left or 0)} GB ({row.name})" for row in fitting)
    told = f"{given}, this is left for the uncounted parts: {left}."
    return f"{told} The states alone do not fit under {too_large}." if too_large else told


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f}"


def to_json(plan: Plan) -> str:
    """The plan for programs: all counts in bytes."""
    document = asdict(plan)
    for row, written in zip(plan.rows, document["rows"], strict=True):
        written["states"]["gpu"] = row.states.gpu
        written["states_fit"] = row.states_fit
    return json.dumps(document, indent=2)


def render(plan: Plan, file: TextIO | None = None) -> None:
    """Prints the table and its assumptions, to stdout unless told otherwise."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    has_memory = plan.gpu_memory_bytes is not None
    title = f"Model states per GPU in GB: {plan.parameters / 1e6:,.1f} M parameters on {plan.num_gpus} GPU(s)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("JSON", no_wrap=True)
    columns = ["weights", "grads", "accum.", "master", "moments", "GPU", "host"]
    for column in [*columns, *(["left"] if has_memory else [])]:
        table.add_column(column, justify="right")
    for row in plan.rows:
        states = row.states
        counts = [states.weights, states.gradients, states.accumulation, states.master_weights, states.moments]
        cells = [_gigabytes(count) for count in [*counts, states.gpu, states.host]]
        if has_memory:
            left = _gigabytes(row.bytes_left or 0)
            cells.append(left if row.states_fit else f"[red]{left}[/red]")
        table.add_row(row.name, *cells)
    console = Console(file=file, highlight=False)
    console.print(table)
    for assumption in plan.assumptions:
        console.print(f"- {assumption}", markup=False)
