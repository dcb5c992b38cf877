"""The plan as people and programs read it: a column per ZeRO JSON, the choice in words, and all that was assumed."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, TextIO

from z2all_ds.base.accounting import FLOP_CONVENTIONS, count_parameters, flops_per_token
from z2all_ds.base.config import RunConfig
from z2all_ds.plan.assumptions import assumptions
from z2all_ds.plan.choose import candidates, explain, rank
from z2all_ds.plan.estimate import Estimate
from z2all_ds.plan.fleet import Fleet
from z2all_ds.plan.memory import zero_states
from z2all_ds.plan.outlook import Outlook, Risks, look_ahead
from z2all_ds.plan.shapes import Advice, advise

WIDTH = 132
"""Columns where no terminal says otherwise."""
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


@dataclass(frozen=True)
class Plan:
    """An answer with the question it answers."""

    run: RunConfig
    fleet: Fleet
    rows: tuple[Estimate, ...]
    """Each JSON with the config's own micro-batch."""
    ranked: tuple[Estimate, ...]
    """Those that fit, each with its best micro-batch, the best first."""
    words: tuple[str, ...]
    advice: tuple[Advice, ...]
    tokens: int | None
    """Of the whole run, where the user has said so."""
    outlook: Outlook | None
    """Of the first."""
    assumptions: tuple[str, ...]


def make_plan(run: RunConfig, fleet: Fleet, tokens: int | None, risks: Risks) -> Plan:
    """`tokens` None means those of train.steps."""
    found = candidates(run, fleet)
    ranked = rank(run, fleet, found.rows)
    train = run.train
    budget = tokens or train.steps * train.global_batch * train.sequence_length
    outlook = look_ahead(ranked[0], budget, risks) if ranked else None
    return Plan(
        run=run,
        fleet=fleet,
        rows=found.rows,
        ranked=tuple(ranked),
        words=tuple(explain(ranked, found.rows)),
        advice=tuple(advise(run.model.shape, train.micro_batch, train.sequence_length)),
        tokens=tokens,
        outlook=outlook,
        assumptions=(*assumptions(run, fleet, found.rows, outlook is not None, risks), *found.left_out),
    )


def to_json(plan: Plan) -> str:
    """For programs: bytes, seconds and shares."""
    shape, length = plan.run.model.shape, plan.run.train.sequence_length
    document = {
        "parameters": count_parameters(shape).total,
        "flops_per_token": {name: flops_per_token(shape, length, name) for name in FLOP_CONVENTIONS},
        "gpus": plan.fleet.gpus,
        "gpu_memory_bytes": plan.fleet.memory,
        "rows": [_row(row) for row in plan.rows],
        "ranked": [_row(row) for row in plan.ranked],
        "words": plan.words,
        "advice": [asdict(one) for one in plan.advice],
        "outlook": asdict(plan.outlook) if plan.outlook else None,
        "assumptions": plan.assumptions,
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _row(row: Estimate) -> dict[str, Any]:
    memory = row.memory
    time = row.time
    return {
        "deepspeed": row.name,
        "stage": row.resolved.stage,
        "micro_batch": row.micro_batch,
        "accumulation": row.resolved.accumulation,
        "dtypes": asdict(row.resolved.dtypes),
        "memory": {**asdict(memory), "allocated": memory.allocated, "total": memory.total},
        "bytes_left": row.left,
        "fits": row.fits if row.left is not None else None,
        "sent_bytes": row.sent,
        "collectives": [{**asdict(one), "sent": one.sent()} for one in row.collectives],
        "offload": asdict(row.offload),
        "step_seconds": {**asdict(time), "least": time.least, "most": time.most} if time else None,
        "mfu": row.utilisations(),
    }


def render(plan: Plan, file: TextIO | None = None) -> None:
    """To stdout unless told otherwise."""
    from rich import box
    from rich.table import Table

    console = console_for(file)
    shape, train = plan.run.model.shape, plan.run.train
    parameters = count_parameters(shape).total
    flops = ", ".join(
        f"{flops_per_token(shape, train.sequence_length, name) / 1e9:.2f} ({name})" for name in FLOP_CONVENTIONS
    )
    console.print(
        f"{parameters / 1e6:,.1f} M parameters, {flops} GFLOP a token; {plan.fleet.gpus} GPU(s)", markup=False
    )
    table = Table(title="GB per GPU", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for row in plan.rows:
        table.add_column(_heading(row.name), justify="right", no_wrap=True)
    for label, cell, ends in _lines(plan):
        cells = [cell(row) for row in plan.rows]
        if any(text not in ("", "-") for text in cells):
            table.add_row(label, *cells, end_section=ends)
    print_whole(console, table)
    assumed = (f"- {assumption}" for assumption in plan.assumptions)
    for line in (*plan.words, *_told_advice(plan.advice), *_told_outlook(plan), "Assumed:", *assumed):
        console.print(line, markup=False, soft_wrap=True)


def _heading(name: str) -> str:
    """A JSON of the user's own goes by its file's name."""
    return PurePath(name).name.removesuffix(".json").replace("_", "\n")


def print_whole(console: Any, table: Any) -> None:
    """However wide it is: a terminal folds a long line, a column that is cut is lost."""
    from rich.measure import Measurement

    before = console.width
    console.width = max(before, Measurement.get(console, console.options.update(max_width=10_000), table).maximum)
    console.print(table)
    console.width = before


def console_for(file: TextIO | None) -> Any:
    from rich.console import Console

    console = Console(file=file, highlight=False)
    return console if console.is_terminal else Console(file=file, highlight=False, width=WIDTH)


Cell = Callable[[Estimate], str]


def _lines(plan: Plan) -> list[tuple[str, Cell, bool]]:
    """(label, cell, whether a rule comes after it)."""

    def part(name: str) -> Cell:
        return lambda row: _gb(getattr(row.memory, name))

    lines: list[tuple[str, Cell, bool]] = [(label, part(name), False) for name, label in PARTS.items()]
    lines[-1] = (*lines[-1][:2], True)
    lines.append(("total", lambda row: _gb(row.memory.total), False))
    if plan.fleet.memory is not None:
        lines.append((f"left of {_gb(plan.fleet.memory)}", lambda row: _left(row), False))
    lines += [
        ("states, ZeRO paper", _textbook, True),
        ("host memory", _host, False),
        ("disk", lambda row: _gb(row.memory.disk), False),
        ("sent a step", lambda row: _gb(row.sent), False),
        ("to and from host", lambda row: _gb(row.offload.to_host + row.offload.to_gpu), False),
        ("disk a step", lambda row: _gb(row.offload.disk_read + row.offload.disk_written), False),
        ("step, s at least", lambda row: f"{row.time.least:.3f}" if row.time else "-", False),
        ("step, s at most", lambda row: f"{row.time.most:.3f}" if row.time else "-", False),
        ("MFU, origin", lambda row: _mfu(row, "origin"), False),
        ("MFU, exact", lambda row: _mfu(row, "exact"), False),
        ("tokens/s", lambda row: f"{row.tokens_per_step / row.time.most:,.0f}" if row.time else "-", False),
    ]
    return lines


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f}" if count >= 5e7 else "-" if count == 0 else "0.0"


def _left(row: Estimate) -> str:
    left = row.left or 0
    told = f"{left / 1e9:.1f}"
    return told if left >= 0 else f"[red]{told}[/red]"


def _host(row: Estimate) -> str:
    told = _gb(row.memory.host)
    known = row.fleet.host_memory
    return f"[red]{told}[/red]" if known is not None and row.host_bytes > known else told


def _textbook(row: Estimate) -> str:
    """16 bytes a parameter, divided by stage: weights and gradients in 16 bits, Adam's 12."""
    if row.resolved.offload_optimizer:
        return "-"
    parameters = count_parameters(row.run.model.shape).total
    return _gb(zero_states(parameters, row.fleet.gpus, row.resolved.stage).gpu)


def _mfu(row: Estimate, convention: str) -> str:
    shares = row.utilisations().get(convention)
    if not shares:
        return "-"
    low, high = (f"{100 * share:.0f}" for share in shares)
    return f"{low}%" if low == high else f"{low}-{high}%"


def _told_advice(advice: Sequence[Advice]) -> list[str]:
    lines = []
    for one in advice:
        gain = f"; saves about {one.gain:.0%} of the computing time" if one.gain else ""
        lines.append(f"Shape: {one.setting}={one.better} instead of {one.now}: {one.reason}{gain}.")
    return lines


def _told_outlook(plan: Plan) -> list[str]:
    outlook = plan.outlook
    if outlook is None:
        return []
    first, seen = plan.ranked[0], outlook.simulated
    return [
        f"{outlook.tokens / 1e9:,.1f} B tokens with {first.name}: {between(outlook.days)} days, "
        f"{between(outlook.gpu_hours)} GPU hours, without failures.",
        f"Checkpoint: {_gb(outlook.checkpoint_bytes)} GB; training waits {outlook.save_seconds:.2f} s, on the disk "
        f"after {outlook.write_seconds:.0f} s. Best every {outlook.interval_seconds / 60:,.0f} minutes "
        f"(checkpoint.every_steps={outlook.interval_steps}).",
        f"Failures: {outlook.failures:.1f} expected, at least one with {outlook.failure_probability:.0%}; "
        f"{outlook.goodput:.2%} of the time is training that counts "
        f"(simulated: {seen.goodput:.2%} +- {seen.error:.2%}).",
    ]


def between(bounds: tuple[float, float]) -> str:
    low, high = (f"{bound:,.1f}" if bound >= 1 else f"{bound:.2g}" for bound in bounds)
    return low if low == high else f"{low} to {high}"
