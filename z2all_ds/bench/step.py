"""`z2all bench step`: what a training step costs here, measured on a short real run through the real launcher.

The median over the second half of the steps: the first ones pay for allocation, autotuning and caches.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from z2all_ds.accounting import count_parameters, flops_per_token, mfu, peak_flops
from z2all_ds.config import RunConfig, load_run_config
from z2all_ds.console import human_bytes, say
from z2all_ds.corpus import SourceSpec, build_corpus
from z2all_ds.errors import ConfigError
from z2all_ds.run_folder import RunFolder
from z2all_ds.tokenizer import train_tokenizer
from z2all_ds.track.writer import read_records
from z2all_ds.train.command import default_ranks, train_on_this_machine

CORPUS_BYTES = 5_000_000
TEXT_VOCAB_SIZE = 2048
MIN_STEPS = 4


@dataclass(frozen=True)
class StepCosts:
    """Medians, with everything needed to run it again."""

    device: str
    ranks: int
    deepspeed: str
    parameters: int
    sequence_length: int
    global_batch: int
    micro_batch: int
    steps: int
    seconds_per_step: float
    tokens_per_second: float
    mfu_origin: float | None
    """6N + 12·L·d·S, embeddings counted."""
    mfu_exact: float | None
    """Products only, causal attention counted half."""
    peak_memory_bytes: int
    last_loss: float
    packages: dict[str, str]
    ops: dict[str, str]
    floor_tokens_per_second: float | None = None
    """What the products and the attention alone allow, on all devices together (`z2all bench floor`)."""
    share_of_floor: float | None = None
    """tokens_per_second over it."""


def bench_step(
    config: str | None, overrides: list[str], ranks: int | None, steps: int, with_floor: bool = False
) -> StepCosts:
    """Trains `steps` steps in a temporary folder, on the text every machine has unless data.corpus says otherwise."""
    if steps < MIN_STEPS:
        raise ConfigError(f"steps={steps}", f"a median needs at least {MIN_STEPS}", "Give more.")
    ranks = default_ranks() if ranks is None else ranks
    with tempfile.TemporaryDirectory(prefix="z2all-bench-") as scratch:
        folder = Path(scratch)
        chosen = [f"run_dir={folder / 'run'}", f"train.steps={steps}", "checkpoint.at_end=false"]
        if not load_run_config(config, overrides).data.corpus:
            sources = [SourceSpec("code", "python_code", max_bytes=CORPUS_BYTES)]
            build_corpus(folder / "corpus", sources)
            train_tokenizer(folder / "corpus", folder / "tokenizer", TEXT_VOCAB_SIZE, CORPUS_BYTES)
            chosen += [f"data.corpus={folder / 'corpus'}", f"data.tokenizer={folder / 'tokenizer'}"]
        resolved = [*overrides, *chosen]
        train_on_this_machine(config, resolved, ranks)
        # Right after the run, so that both meet the same warm machine.
        floor = floor_in_own_process(config, overrides) if with_floor else None
        costs = summarise(load_run_config(config, resolved), RunFolder(folder / "run"), ranks)
    return beside_floor(costs, floor) if floor else costs


def floor_in_own_process(config: str | None, overrides: list[str]) -> dict[str, Any] | None:
    """What `z2all bench floor` says; None where it cannot be measured, which costs a line and not the run's figures."""
    named = ["--config", config] if config else []
    command = [sys.executable, "-m", "z2all_ds", "bench", "floor", "--json", *named, *overrides]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        say(f"no floor: `z2all bench floor` ended with code {done.returncode}")
        return None
    floor: dict[str, Any] = json.loads(done.stdout)
    return floor


def beside_floor(costs: StepCosts, floor: dict[str, Any]) -> StepCosts:
    """The same with its distance to the floor. A GPU rank has a device of its own; CPU ranks share the machine."""
    devices = costs.ranks if "cuda" in floor["measured_on"] else 1
    allowed = devices * floor["tokens_per_second"]
    return replace(costs, floor_tokens_per_second=allowed, share_of_floor=costs.tokens_per_second / allowed)


def summarise(run: RunConfig, folder: RunFolder, ranks: int) -> StepCosts:
    """From what the run itself has written down."""
    records = list(read_records(folder.metrics))
    environment = json.loads(folder.environment.read_text(encoding="utf-8"))
    seconds = statistics.median(record["step_seconds"] for record in records[len(records) // 2 :])
    tokens_per_second = run.train.global_batch * run.train.sequence_length / seconds
    peak = peak_flops(environment["device"])
    shares = {
        convention: mfu(
            tokens_per_second,
            flops_per_token(run.model.shape, run.train.sequence_length, convention),
            peak and peak * ranks,
        )
        for convention in ("origin", "exact")
    }
    return StepCosts(
        device=environment["device"],
        ranks=ranks,
        deepspeed=run.deepspeed,
        parameters=count_parameters(run.model.shape).total,
        sequence_length=run.train.sequence_length,
        global_batch=run.train.global_batch,
        micro_batch=run.train.micro_batch,
        steps=len(records),
        seconds_per_step=seconds,
        tokens_per_second=tokens_per_second,
        mfu_origin=shares["origin"],
        mfu_exact=shares["exact"],
        peak_memory_bytes=max(record["peak_memory_bytes"] for record in records),
        last_loss=records[-1]["loss"],
        packages=environment["packages"],
        ops={choice["op"]: choice["backend"] for choice in environment["ops"]},
    )


def to_json(costs: StepCosts) -> str:
    return json.dumps(asdict(costs), indent=2, ensure_ascii=False)


def to_line(costs: StepCosts) -> str:
    """For people."""
    shares = [f"{name} {100 * share:.1f}%" for name, share in
              (("MFU", costs.mfu_origin), ("MFU exact", costs.mfu_exact)) if share is not None]  # fmt: skip
    parts = [
        f"{costs.device} × {costs.ranks}",
        f"{costs.deepspeed} {costs.micro_batch}/{costs.global_batch} × {costs.sequence_length}",
        f"{costs.parameters / 1e6:,.1f} M parameters",
        f"{costs.seconds_per_step:.3f} s/step",
        f"{costs.tokens_per_second:,.0f} tok/s",
        *shares,
        *([f"{100 * costs.share_of_floor:.1f}% of the floor"] if costs.share_of_floor is not None else []),
        f"peak {human_bytes(costs.peak_memory_bytes)}",
    ]
    return " | ".join(parts)
