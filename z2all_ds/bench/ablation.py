"""`z2all bench step --ablate`: what each part of the speed is worth, a real short run for each row.

`naive` has every op at its reference, `use_all` what `auto` takes; then each op in turn goes back to its reference. For
linear, auto is the reference, so its row is what 8 bits add. A part can take others along: without our rms_norm no
micro-batch can be captured as a graph. Utilisations are by the two conventions of `accounting.py`, and HFU counts what
is computed a second time, too.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from z2all_ds.base.config import load_run_config
from z2all_ds.base.console import heartbeat, human_bytes
from z2all_ds.base.errors import ConfigError
from z2all_ds.bench.peers.environments import last_words
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
ALL_REFERENCES = tuple(f"ops.{op}={reference}" for op, reference in REFERENCES.items())
NAIVE = (*ALL_REFERENCES, "train.cuda_graphs=never")
COMMON = ("deepspeed=zero1",)
"""Of every row, below the user's own overrides: the JSON with which every part can run."""


@dataclass(frozen=True)
class AblationRow:
    """One run: its name and what it changes."""

    name: str
    overrides: tuple[str, ...] = ()


EAGER_ROWS = (
    AblationRow("naive", NAIVE),
    AblationRow("use_all"),
    *(AblationRow(f"without_{op}", (f"ops.{op}={REFERENCES[op]}",)) for op in REFERENCES if op != "linear"),
    AblationRow("graphs_off", ("train.cuda_graphs=never",)),
    AblationRow("fp8", ("ops.linear=fp8",)),
)
COMPILED_ROWS = (
    AblationRow("naive_compile_layers", (*NAIVE, "train.compile=layers")),
    AblationRow("compile_layers", ("train.compile=layers",)),
)
ROWS = (*EAGER_ROWS, *COMPILED_ROWS)


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
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ConfigError(f"row {wrong[0]!r}", "no such row", f"Known: {', '.join(known)}.")
    return [row for row in ROWS if row.name in (names or known)]


def ablate(
    config: str | None, overrides: list[str], ranks: int | None, steps: int, names: Sequence[str] = ()
) -> Iterator[AblationResult]:
    """Each row as soon as it is measured. All read the same data, made once."""
    rows = chosen_rows(names)
    if steps < MIN_STEPS:
        raise ConfigError(f"steps={steps}", f"a median needs at least {MIN_STEPS}", "Give more.")
    load_run_config(config, overrides)  # a mistake of the user's is one line, not one a row
    return _results(rows, config, overrides, ranks, steps)


def _results(
    rows: list[AblationRow], config: str | None, overrides: list[str], ranks: int | None, steps: int
) -> Iterator[AblationResult]:
    with tempfile.TemporaryDirectory(prefix="z2all-bench-") as scratch:
        data = prepare_data(config, overrides, Path(scratch))
        for row in rows:
            yield run_row(row, config, [*COMMON, *overrides, *row.overrides, *data], ranks, steps)


def run_row(
    row: AblationRow, config: str | None, overrides: list[str], ranks: int | None, steps: int
) -> AblationResult:
    """`z2all bench step` in a process of its own, so that whatever ends it ends one row."""
    options = [*(["--config", config] if config else []), *(["--ranks", str(ranks)] if ranks is not None else [])]
    command = [sys.executable, "-m", "z2all_ds", "bench", "step", "--json", "--steps", str(steps), *options]
    with heartbeat(row.name):
        done = subprocess.run([*command, *overrides], capture_output=True, text=True)
    if done.returncode:
        # The run's folder, and with it the log that its ranks refer to, is gone.
        reason = re.sub(r" \(rank \d+; see [^)]*\)$", "", last_words(done.stderr))
        return AblationResult(row.name, row.overrides, failed=reason)
    costs = StepCosts(**json.loads(done.stdout))
    return AblationResult(row.name, row.overrides, costs=costs)


def to_json(results: Sequence[AblationResult]) -> str:
    return json.dumps({"rows": [asdict(result) for result in results]}, indent=2, ensure_ascii=False)


def header() -> str:
    return f"{'row':<24}{'s/iter':>9}{'tok/s':>11}{'MFU':>8}{'exact':>8}{'HFU':>8}{'peak':>12}"


def to_line(result: AblationResult) -> str:
    """For people."""
    costs = result.costs
    if costs is None:
        return f"{result.name:<24}  {result.failed}"
    shares = (
        f"{'-' if share is None else f'{100 * share:.1f}%':>8}"
        for share in (costs.mfu_origin, costs.mfu_exact, costs.hfu)
    )
    speed = f"{costs.seconds_per_step:>9.3f}{costs.tokens_per_second:>11,.0f}"
    return f"{result.name:<24}{speed}{''.join(shares)}{human_bytes(costs.peak_memory_bytes):>12}"
