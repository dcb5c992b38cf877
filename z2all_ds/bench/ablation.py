"""`z2all bench step --ablate`: what each part of the speed is worth, by a real short run per row.

`naive` has every op at its reference, `use_all` what `auto` takes; then each op in turn goes back to its reference. For
linear, auto is the reference, so its row shows what 8 bits add. A part can take others along: without our rms_norm no
micro-batch can be captured as a graph. MFU is by the two conventions of `accounting.py`.
"""

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from z2all_ds.base.config import load_run_config
from z2all_ds.base.console import heartbeat, human_bytes
from z2all_ds.bench.shared import last_words, require_at_least, require_known, run_process, scratch_folder
from z2all_ds.bench.step import MIN_STEPS, StepCosts
from z2all_ds.train.fallback_data import prepare_data

REFERENCES = {
    "attention": "eager",
    "rope": "torch",
    "rms_norm": "torch",
    "swiglu": "torch",
    "linear": "torch",
    "cross_entropy": "torch",
}
NAIVE = (*(f"ops.{op}={reference}" for op, reference in REFERENCES.items()), "train.cuda_graphs=never")
COMMON = ("deepspeed=zero1",)
"""Of every row, below the user's own overrides: the JSON with which every part can run."""


@dataclass(frozen=True)
class AblationRow:
    """One run: its name and what it changes."""

    name: str
    overrides: tuple[str, ...] = ()


ROWS = (
    AblationRow("naive", NAIVE),
    AblationRow("use_all"),
    *(AblationRow(f"without_{op}", (f"ops.{op}={REFERENCES[op]}",)) for op in REFERENCES if op != "linear"),
    AblationRow("graphs_off", ("train.cuda_graphs=never",)),
    AblationRow("fp8", ("ops.linear=fp8",)),
    AblationRow("naive_compile_layers", (*NAIVE, "train.compile=layers")),
    AblationRow("compile_layers", ("train.compile=layers",)),
)


@dataclass(frozen=True)
class AblationResult:
    """A measured row, or one that failed and says why."""

    name: str
    overrides: tuple[str, ...]
    failed: str = ""
    costs: StepCosts | None = None


def chosen_rows(names: Sequence[str]) -> list[AblationRow]:
    """Those named, in the table's order; all without a name."""
    known = [row.name for row in ROWS]
    require_known("row", names, known)
    return [row for row in ROWS if row.name in (names or known)]


def ablate(
    config: str | None, overrides: list[str], ranks: int | None, steps: int, names: Sequence[str] = ()
) -> Iterator[AblationResult]:
    """Yields each row as soon as it is measured. All read the same data, made once. Checks everything at once."""
    rows = chosen_rows(names)
    require_at_least(MIN_STEPS, steps=steps)
    load_run_config(config, overrides)  # a mistake of the user's is one line, not one per row

    def results() -> Iterator[AblationResult]:
        with scratch_folder() as scratch:
            data = prepare_data(config, overrides, scratch)
            for row in rows:
                yield run_row(row, config, [*COMMON, *overrides, *row.overrides, *data], ranks, steps)

    return results()


def run_row(
    row: AblationRow, config: str | None, overrides: list[str], ranks: int | None, steps: int
) -> AblationResult:
    """`z2all bench step` in a process of its own, so that whatever ends it ends one row."""
    options = [*(["--config", config] if config else []), *(["--ranks", str(ranks)] if ranks is not None else [])]
    with heartbeat(row.name):
        done = run_process(
            ["-m", "z2all_ds", "bench", "step", "--json", "--steps", str(steps), *options, *overrides],
            stderr=subprocess.PIPE,
        )
    if done.returncode:
        # The run's folder, and with it the log that its ranks refer to, is gone.
        reason = re.sub(r" \(rank \d+; see [^)]*\)$", "", last_words(done.stderr))
        return AblationResult(row.name, row.overrides, failed=reason)
    return AblationResult(row.name, row.overrides, costs=StepCosts(**json.loads(done.stdout)))


HEAD = f"{'row':<24}{'s/iter':>9}{'tok/s':>11}{'MFU':>8}{'exact':>8}{'HFU':>8}{'peak':>12}"


def to_line(result: AblationResult) -> str:
    """Returns the row for people."""
    costs = result.costs
    if costs is None:
        return f"{result.name:<24}  {result.failed}"
    shares = ("-" if share is None else f"{share:.1%}" for share in (costs.mfu_origin, costs.mfu_exact, costs.hfu))
    speed = f"{costs.seconds_per_step:>9.3f}{costs.tokens_per_second:>11,.0f}"
    peak = human_bytes(costs.peak_memory_bytes)
    return f"{result.name:<24}{speed}{''.join(f'{share:>8}' for share in shares)}{peak:>12}"
