"""`z2all bench step`: the cost of a training step on this machine, measured on a short real run.

Figures are medians over the second half of the steps: the first steps include allocation, autotuning and cold caches.

With `--ablate` there is one such run per row. `naive` has the reference backend of every op, `use_all` the choice of
`auto`; then one op at a time is set to its reference. For linear, `auto` is the reference, so its row shows the gain of
fp8. One change can disable other optimizations: without our rms_norm no micro-batch can be captured as a CUDA graph.
"""

import json
import re
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.accounting import count_parameters, mfu, operations_per_token, peak_flops
from z2all_ds.base.child_process import module_command
from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.console import heartbeat, human_bytes, say
from z2all_ds.base.reports import Shown
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.bench.in_ranks import measure_in_ranks
from z2all_ds.bench.shared import Report, error_line, require_at_least, require_known, run_process, scratch_folder
from z2all_ds.track.writer import read_records
from z2all_ds.train.command import default_ranks, train_on_this_machine
from z2all_ds.train.fallback_data import prepare_data

MIN_STEPS = 4
PEER_MODULE = "z2all_ds.bench.peers.hf_llama"
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
"""Overrides of every row of --ablate, before the user's own: all optimizations can run under this JSON."""
ROWS: dict[str, tuple[str, ...]] = {
    "naive": NAIVE,
    "use_all": (),
    **{f"without_{op}": (f"ops.{op}={backend}",) for op, backend in REFERENCES.items() if op != "linear"},
    "graphs_off": ("train.cuda_graphs=never",),
    "fp8": ("ops.linear=fp8",),
    "naive_compile_layers": (*NAIVE, "train.compile=layers"),
    "compile_layers": ("train.compile=layers",),
}
"""Name -> overrides."""


def bench_step(
    config: str | None,
    overrides: list[str],
    ranks: int | None,
    steps: int,
    with_floor: bool = False,
    with_peer: bool = False,
) -> Report:
    """Train `steps` steps in a temporary folder, on built-in text unless data.corpus is set. Return the costs."""
    require_at_least(MIN_STEPS, steps=steps)
    ranks = default_ranks() if ranks is None else ranks
    with scratch_folder() as folder:
        chosen = [f"run_dir={folder / 'run'}", f"train.steps={steps}", "checkpoint.at_end=false"]
        run = load_run_config(config, [*overrides, *prepare_data(config, overrides, folder), *chosen])
        train_on_this_machine(run, ranks)
        costs = costs_of_run(run, RunFolder(folder / "run"), ranks)
        # Right after the run, so that all are measured on the same warm machine.
        if with_peer:
            add_peer(costs, config, ["--steps", str(steps), *overrides], folder / "peer.log")
        if with_floor:
            add_floor(costs, config, overrides)
    return costs


def costs_of_run(run: RunConfig, folder: RunFolder, ranks: int) -> Report:
    """Compute the costs from the files that the run has written."""
    records = list(read_records(folder.metrics))
    environment = json.loads(folder.environment.read_text(encoding="utf-8"))
    seconds = statistics.median(record["step_seconds"] for record in records[len(records) // 2 :])
    train, shape = run.train, run.model.shape
    tokens_per_second = train.global_batch * train.sequence_length / seconds
    ops = {choice["op"]: choice["backend"] for choice in environment["ops"]}
    operations = operations_per_token(
        shape, train.sequence_length, train.activation_checkpointing, train.recompute, ops["cross_entropy"]
    )
    peak = peak_flops(environment["device"])
    shares = {name: mfu(tokens_per_second, flops, peak and peak * ranks) for name, flops in operations.items()}
    return {
        "device": environment["device"],
        "ranks": ranks,
        "deepspeed": run.deepspeed,
        "parameters": count_parameters(shape).total,
        "sequence_length": train.sequence_length,
        "global_batch": train.global_batch,
        "micro_batch": train.micro_batch,
        "steps": len(records),
        "seconds_per_step": seconds,
        "tokens_per_second": tokens_per_second,
        "mfu_origin": shares["origin"],  # 6N + 12·L·d·S, with embeddings
        "mfu_exact": shares["exact"],  # products only, half of the attention (causal)
        "hfu": shares["executed"],  # as exact, plus recomputation
        "peak_memory_bytes": max(record["peak_memory_bytes"] for record in records),
        "last_loss": records[-1]["loss"],
        "packages": environment["packages"],
        "ops": ops,
        **dict.fromkeys(("floor_tokens_per_second", "share_of_floor", "peer", "times_peer")),
    }


def add_peer(costs: Report, config: str | None, arguments: list[str], log: Path) -> None:
    """Measure Hugging Face's Llama with Liger under the same DeepSpeed JSON. If that fails, print why."""
    peer = measure_in_ranks(PEER_MODULE, config, arguments, costs["ranks"], log, "measuring the peer")
    if isinstance(peer, str):
        say(f"no peer: {peer}")
    else:
        costs |= {"peer": peer, "times_peer": costs["tokens_per_second"] / peer["tokens_per_second"]}


def add_floor(costs: Report, config: str | None, overrides: list[str]) -> None:
    """Measure the floor in a process of its own, for all devices together. If that fails, print why."""
    options = ["--config", config] if config else []
    done = run_process(module_command("z2all_ds", "bench", "floor", "--json", *options, *overrides))
    if done.returncode:
        say(f"no floor: `z2all bench floor` ended with code {done.returncode}")
        return
    floor = json.loads(done.stdout)
    devices = costs["ranks"] if "cuda" in floor["measured_on"] else 1  # CPU ranks share the machine
    rate = devices * floor["tokens_per_second"]
    costs |= {"floor_tokens_per_second": rate, "share_of_floor": costs["tokens_per_second"] / rate}


def describe(costs: Report) -> Shown:
    """Yield one line, and a second one about the peer if it was measured."""
    shares = {"MFU": costs["mfu_origin"], "MFU exact": costs["mfu_exact"], "HFU": costs["hfu"]}
    yield " | ".join(
        [
            f"{costs['device']} × {costs['ranks']}",
            f"{costs['deepspeed']} {costs['micro_batch']}/{costs['global_batch']} × {costs['sequence_length']}",
            f"{costs['parameters'] / 1e6:,.1f} M parameters",
            f"{costs['seconds_per_step']:.3f} s/step | {costs['tokens_per_second']:,.0f} tok/s",
            *(f"{name} {share:.1%}" for name, share in shares.items() if share is not None),
            *([f"{costs['share_of_floor']:.1%} of the floor"] if costs["share_of_floor"] else []),
            f"peak {human_bytes(costs['peak_memory_bytes'])}",
        ]
    )
    if peer := costs["peer"]:
        yield (
            f"peer: {peer['name']} | {peer['seconds_per_step']:.3f} s/step | {peer['tokens_per_second']:,.0f} tok/s"
            f" | peak {human_bytes(peer['peak_memory_bytes'])} | ours is {costs['times_peer']:.2f} times as fast"
        )


# --ablate


@dataclass(frozen=True)
class AblationRow:
    """The costs of one row, or the reason of its failure."""

    name: str
    overrides: tuple[str, ...]
    failed: str = ""
    costs: Report | None = None


def ablate(
    config: str | None, overrides: list[str], ranks: int | None, steps: int, names: Sequence[str] = ()
) -> Iterator[AblationRow]:
    """Check all settings, then return an iterator that measures the named rows, or all, on the same data."""
    require_known("row", names, list(ROWS))
    require_at_least(MIN_STEPS, steps=steps)
    load_run_config(config, overrides)

    def measure() -> Iterator[AblationRow]:
        with scratch_folder() as scratch:
            data = prepare_data(config, overrides, scratch)
            for name, changes in ROWS.items():
                if name in (names or ROWS):
                    all_overrides = [*COMMON, *overrides, *changes, *data]
                    yield measure_row(name, changes, config, all_overrides, ranks, steps)

    return measure()


def measure_row(
    name: str, changes: tuple[str, ...], config: str | None, overrides: list[str], ranks: int | None, steps: int
) -> AblationRow:
    """Run `z2all bench step` in a process of its own, so that a failure ends only this row."""
    options = [*(["--config", config] if config else []), *(["--ranks", str(ranks)] if ranks is not None else [])]
    command = module_command("z2all_ds", "bench", "step", "--json", "--steps", str(steps), *options, *overrides)
    with heartbeat(name):
        done = run_process(command, stderr=subprocess.PIPE)
    if done.returncode:
        # The run's folder is deleted, and with it the log file that the message names.
        reason = re.sub(r" \(rank \d+; see [^)]*\)$", "", error_line(done.stderr))
        return AblationRow(name, changes, failed=reason)
    return AblationRow(name, changes, costs=json.loads(done.stdout))


HEAD = f"{'row':<24}{'s/iter':>9}{'tok/s':>11}{'MFU':>8}{'exact':>8}{'HFU':>8}{'peak':>12}"


def to_line(row: AblationRow) -> str:
    """Return one line of the table."""
    costs = row.costs
    if costs is None:
        return f"{row.name:<24}  {row.failed}"
    shares = (costs[name] for name in ("mfu_origin", "mfu_exact", "hfu"))
    cells = "".join(f"{'-' if share is None else f'{share:.1%}':>8}" for share in shares)
    speed = f"{costs['seconds_per_step']:>9.3f}{costs['tokens_per_second']:>11,.0f}"
    return f"{row.name:<24}{speed}{cells}{human_bytes(costs['peak_memory_bytes']):>12}"
