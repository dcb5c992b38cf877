"""The plan as table, JSON and run config: a column per ZeRO JSON, the choice in words, and all assumptions."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from z2all_ds.base.accounting import FLOP_CONVENTIONS, count_parameters, flops_per_token
from z2all_ds.base.config import RunConfig, dump_yaml
from z2all_ds.base.config.stages import run_stages
from z2all_ds.base.console import say
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.outputs import check_output, write_output
from z2all_ds.base.reports import Cell, Table
from z2all_ds.plan.choose import candidates, explain, rank
from z2all_ds.plan.estimate import Estimate
from z2all_ds.plan.fleet import Fleet
from z2all_ds.plan.memory import (
    CUDA_CONTEXT,
    HOLES,
    HOLES_IN_GRAPHS,
    HOLES_WHERE_GATHERED,
    NCCL,
    states_of_zero_paper,
)
from z2all_ds.plan.outlook import MOST_FAILURES, SIMULATED_RUNS, Outlook, Risks, look_ahead
from z2all_ds.plan.shapes import Advice, advise

PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "accumulation": "accumulation",
    "master_weights": "master weights",
    "moments": "moments",
    "gathered": "gathered weights",
    "buckets": "buckets, copies",
    "activations": "activations",
    "logits": "logits",
    "context": "CUDA, NCCL",
    "fragmentation": "holes",
}
PAPER = "states, ZeRO paper"
CellOf = Callable[[Estimate], Cell]


@dataclass(frozen=True)
class Plan:
    """A plan with the run and the fleet that it is for."""

    run: RunConfig
    fleet: Fleet
    rows: tuple[Estimate, ...]  # Each JSON with the config's own micro-batch
    ranked: tuple[Estimate, ...]  # JSONs that fit, each with its best micro-batch, the best first
    words: tuple[str, ...]
    advice: tuple[Advice, ...]
    tokens: int | None  # Tokens of the whole run, if the user gives them
    outlook: Outlook | None  # Outlook of the best choice
    assumptions: tuple[str, ...]


def make_plan(run: RunConfig, fleet: Fleet, tokens: int | None, risks: Risks) -> Plan:
    """Plan the run; `tokens` None means those of train.steps."""
    rows, left_out = candidates(run, fleet)
    ranked = rank(run, fleet, rows)
    train = run.train
    budget = tokens or train.steps * train.global_batch * train.sequence_length
    outlook = look_ahead(ranked[0], budget, risks) if ranked else None
    return Plan(
        run=run,
        fleet=fleet,
        rows=tuple(rows),
        ranked=tuple(ranked),
        words=tuple(explain(ranked, rows)),
        advice=tuple(advise(run.model.shape, train.micro_batch, train.sequence_length)),
        tokens=tokens,
        outlook=outlook,
        assumptions=(*assumptions(run, fleet, rows, outlook is not None, risks), *left_out),
    )


def assumptions(
    run: RunConfig, fleet: Fleet, rows: Sequence[Estimate], with_outlook: bool, risks: Risks
) -> tuple[str, ...]:
    """Return a line for everything that the plan assumes and that the user has not given."""
    train = run.train
    asked = [f"{op}={backend}" for op, backend in run.ops.model_dump().items() if backend != "auto"]
    ops = ", ".join(asked) or "those that auto takes on a GPU"
    optimizers = ", ".join(sorted({one.resolved.optimizer.kind for one in rows}))
    packed = "documents masked" if run.data.document_mask else "no document mask"
    dtypes = {str(one.resolved.dtypes): one.name for one in reversed(rows)}
    lines = [
        "GB are 10^9 bytes. Parts are those at the peak, without gradients that appear as activations are freed.",
        f"{train.micro_batch} x {train.sequence_length} tokens per micro-batch, {train.global_batch} samples per step,"
        f" checkpointing {train.activation_checkpointing}, {packed}; ops: {ops}; optimizer: {optimizers}.",
        *(f"Dtypes from {name} on: {words}." for words, name in reversed(dtypes.items())),
        f"CUDA takes {CUDA_CONTEXT / 1e9:.1f} GB, NCCL {NCCL / 1e9:.1f} with several ranks. Holes, of what is"
        f" allocated: {HOLES_IN_GRAPHS:.0%} with CUDA graphs, {HOLES:.0%} without, {HOLES_WHERE_GATHERED:.0%} at ZeRO-3"
        " over several ranks or with offload.",
        *fleet.assumptions,
    ]
    if fleet.memory is None:
        lines.append("Neither --gpu nor --gpu-memory is given: the plan does not state what fits.")
    if fleet.peak is None:
        lines.append("Neither --gpu nor --peak-tflops is given: the plan does not state times.")
    else:
        shares = ", ".join(f"{one.name} {one.reached:.0%}" for one in rows if one.reached)
        lines += [
            f"Share of the peak that training reaches: {shares} (measured on an H200; --reached replaces it).",
            "Attention is computed over whole samples; masked documents need less of it.",
            "Step times range from full overlap of sending and computing, where DeepSpeed overlaps them, to none.",
        ]
        if any(one.resolved.dtype == "fp32" for one in rows):
            lines.append("There are no step times for fp32, because its speed depends on TF32.")
    if with_outlook:
        lines.append(
            f"A failure every {risks.gpu_hours_per_failure:,.0f} GPU hours (Llama 3 saw 50,000),"
            f" {risks.restart_seconds:.0f} s to start again, checkpoints to one disk that all machines share."
            f" Simulated: {SIMULATED_RUNS} runs, of up to {MOST_FAILURES:,} failures."
        )
    return tuple(lines)


def content_of(plan: Plan) -> dict[str, Any]:
    """Return the content of the JSON report, in bytes, seconds and shares."""
    shape, length = plan.run.model.shape, plan.run.train.sequence_length
    return {
        "parameters": count_parameters(shape).total,
        "flops_per_token": {name: flops_per_token(shape, length, name) for name in FLOP_CONVENTIONS},
        "gpus": plan.fleet.gpus,
        "gpu_memory_bytes": plan.fleet.memory,
        "rows": [_row(row) for row in plan.rows],
        "ranked": [_row(row) for row in plan.ranked],
        "words": plan.words,
        "advice": plan.advice,
        "outlook": plan.outlook,
        "assumptions": plan.assumptions,
    }


def _row(row: Estimate) -> dict[str, Any]:
    return {
        "deepspeed": row.name,
        "stage": row.resolved.stage,
        "micro_batch": row.micro_batch,
        "accumulation": row.resolved.accumulation,
        "dtypes": row.resolved.dtypes,
        "memory": {**asdict(row.memory), "allocated": row.memory.allocated, "total": row.memory.total},
        "bytes_left": row.left,
        "fits": row.fits if row.left is not None else None,
        "sent_bytes": row.sent,
        "collectives": [{**asdict(one), "sent": one.sent()} for one in row.collectives],
        "offload": row.offload,
        "step_seconds": row.time.to_dict() if row.time else None,
        "mfu": row.utilisations(),
    }


def describe(plan: Plan) -> Iterator[str | Table]:
    """Yield the plan as lines and a table with a column per JSON."""
    shape, train = plan.run.model.shape, plan.run.train
    flops = ", ".join(
        f"{flops_per_token(shape, train.sequence_length, name) / 1e9:.2f} ({name})" for name in FLOP_CONVENTIONS
    )
    parameters = count_parameters(shape).total / 1e6
    yield f"{parameters:,.1f} M parameters, {flops} GFLOP per token; {plan.fleet.gpus} GPU(s)"
    # A JSON of the user's own goes by its file's name.
    names = [PurePath(row.name).name.removesuffix(".json").replace("_", "\n") for row in plan.rows]
    rows: list[Sequence[Cell]] = []
    for label, cell in _lines(plan):
        cells = [cell(row) for row in plan.rows]
        if any(one not in ("", "-") for one in cells):
            rows.append((label, *cells))
            if label in (PARTS["fragmentation"], PAPER):
                rows.append(())
    yield Table(("GB per GPU", *names), rows)
    yield ""
    yield from (*plan.words, *_advice_lines(plan.advice), *_outlook_lines(plan))
    yield from assumed_lines(plan.assumptions)


def assumed_lines(assumptions: Iterable[str]) -> list[str]:
    return ["Assumed:", *(f"- {assumption}" for assumption in assumptions)]


def _lines(plan: Plan) -> list[tuple[str, CellOf]]:
    """Return the label and the cells of each line of the table."""

    def part(name: str) -> CellOf:
        return lambda row: _gb(getattr(row.memory, name))

    lines: list[tuple[str, CellOf]] = [(label, part(name)) for name, label in PARTS.items()]
    lines.append(("total", lambda row: _gb(row.memory.total)))
    if plan.fleet.memory is not None:
        lines.append(
            (f"left of {_gb(plan.fleet.memory)}", lambda row: _red(f"{(row.left or 0) / 1e9:.1f}", (row.left or 0) < 0))
        )
    return [
        *lines,
        (PAPER, _paper),
        ("host memory", lambda row: _red(_gb(row.memory.host), row.host_bytes > (row.fleet.host_memory or math.inf))),
        ("disk", lambda row: _gb(row.memory.disk)),
        ("sent per step", lambda row: _gb(row.sent)),
        ("to and from host", lambda row: _gb(row.over_bus)),
        ("disk per step", lambda row: _gb(row.offload.disk_read + row.offload.disk_written)),
        ("step, s at least", lambda row: f"{row.time.least:.3f}" if row.time else "-"),
        ("step, s at most", lambda row: f"{row.time.most:.3f}" if row.time else "-"),
        ("MFU, origin", lambda row: _mfu(row, "origin")),
        ("MFU, exact", lambda row: _mfu(row, "exact")),
        ("tokens/s", lambda row: f"{row.tokens_per_step / row.time.most:,.0f}" if row.time else "-"),
    ]


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f}" if count >= 5e7 else "-" if count == 0 else "0.0"


def _red(text: str, is_red: bool) -> Cell:
    return (text, "red") if is_red else text


def _paper(row: Estimate) -> str:
    if row.resolved.offload_optimizer:
        return "-"
    parameters = count_parameters(row.run.model.shape).total
    return _gb(states_of_zero_paper(parameters, row.fleet.gpus, row.resolved.stage))


def _mfu(row: Estimate, convention: str) -> str:
    shares = row.utilisations().get(convention)
    return percent_range(shares) if shares else "-"


def _advice_lines(advice: Iterable[Advice]) -> list[str]:
    lines = []
    for one in advice:
        gain = f"; saves about {one.gain:.0%} of the computing time" if one.gain else ""
        lines.append(f"Shape: {one.setting}={one.better} instead of {one.now}: {one.reason}{gain}.")
    return lines


def _outlook_lines(plan: Plan) -> list[str]:
    outlook = plan.outlook
    if outlook is None:
        return []
    return [
        f"{outlook.tokens / 1e9:,.1f} B tokens with {plan.ranked[0].name}: {span(outlook.days)} days, "
        f"{span(outlook.gpu_hours)} GPU hours, without failures.",
        f"Checkpoint: {_gb(outlook.checkpoint_bytes)} GB; training waits {outlook.save_seconds:.2f} s, on the disk "
        f"after {outlook.write_seconds:.0f} s. Best every {outlook.interval_seconds / 60:,.0f} minutes "
        f"(checkpoint.every_steps={outlook.interval_steps}).",
        f"Failures: {outlook.failures:.1f} expected, at least one with {outlook.failure_probability:.0%}; "
        f"{outlook.goodput:.2%} of the time is training that counts "
        f"(simulated: {outlook.simulated.goodput:.2%} +- {outlook.simulated.error:.2%}).",
    ]


def span(bounds: tuple[float, float]) -> str:
    """Return '1.5 to 2.0', or one number if both are printed alike."""
    low, high = (f"{bound:,.1f}" if bound >= 1 else f"{bound:.2g}" for bound in bounds)
    return low if low == high else f"{low} to {high}"


def percent_range(shares: tuple[float, float]) -> str:
    """Return '40-45%', or '40%' if both are printed alike."""
    low, high = (f"{100 * share:.0f}" for share in shares)
    return f"{low}%" if low == high else f"{low}-{high}%"


def check_name(path: Path) -> None:
    """Refuse a file name for `--write` that is not a new YAML file. It gets no mark to be replaced: users edit it."""
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--write {path}", "must end in .yaml", "Give such a name.")
    check_output(path, "--write")


def write_choice(plan: Plan, path: Path) -> None:
    """Write the run config of the first choice, with the best checkpoint interval and the steps for --tokens."""
    if not plan.ranked:
        raise ConfigError(f"--write {path}", "nothing fits, so there is nothing to write", plan.words[0])
    check_name(path)
    first = plan.ranked[0]
    checkpoint, train = first.run.checkpoint, first.run.train
    if plan.outlook:
        checkpoint = checkpoint.model_copy(update={"every_steps": plan.outlook.interval_steps})
    if plan.tokens:
        train = train.model_copy(update={"steps": -(-plan.tokens // first.tokens_per_step)})
    run = first.run.model_copy(update={"checkpoint": checkpoint, "train": train})
    run_stages(run)  # raises if the stages no longer fit into the steps
    write_output(path, dump_yaml(run), "--write")
    say(f"wrote {path}: {first.name}, micro-batches of {first.micro_batch}; start it with --config {path}")
