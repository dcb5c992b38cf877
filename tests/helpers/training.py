"""Small real training runs: the real deepspeed launcher, two gloo ranks on the CPU, and a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from z2all_ds.base.machine import default_environment, free_port

MICRO_OVERRIDES = (
    "model.vocab_size=1024",
    "model.hidden_size=32",
    "model.intermediate_size=88",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.max_position_embeddings=64",
    "train.sequence_length=32",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.steps=12",
    "optimizer.lr=0.003",
    "schedule.warmup_steps=3",
)
"""Two micro-batches per rank and step, so that accumulation is part of every test."""


def run_arguments(run_dir: Path, corpus: Path, tokenizer: Path, *overrides: str) -> list[str]:
    """Return the arguments that follow `z2all train` or `pretrain.py`."""
    folders = (f"run_dir={run_dir}", f"data.corpus={corpus}", f"data.tokenizer={tokenizer}")
    return [*MICRO_OVERRIDES, *folders, *overrides]


def train(
    run_dir: Path, corpus: Path, tokenizer: Path, *overrides: str, ranks: int = 2
) -> subprocess.CompletedProcess[str]:
    """Run `z2all train` as a user does, and return the finished process with its exit code and output."""
    command = [sys.executable, "-m", "z2all_ds", "train", "--ranks", str(ranks)]
    arguments = run_arguments(run_dir, corpus, tokenizer, *overrides)
    return subprocess.run([*command, *arguments], capture_output=True, text=True)


def launch_script(
    script: Path, *arguments: str, ranks: int = 2, launcher: list[str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `deepspeed --num_gpus N script arguments`, or the same with another launcher, without `z2all`."""
    launcher = launcher or [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
    port = free_port()
    command = [*launcher, "--master_port", str(port), str(script), *arguments]
    environment = {**os.environ, **default_environment(ranks)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not list(Path("/dev/shm").glob(f"*_{port}_*")), "shared memory is left behind"
    return result


def train_many(folder: Path, plan: list[list[str]]) -> list[int]:
    """Run all trainings of the plan in one launch, and return their exit codes, which must be equal on both ranks."""
    file = folder / "plan.json"
    file.write_text(json.dumps(plan), encoding="utf-8")
    result = launch_script(Path(__file__).with_name("many_runs.py"), str(file))
    assert result.returncode == 0, f"{result.stderr}\n{result.stdout[-4000:]}"  # the launcher prints the exit code
    codes = [json.loads((folder / f"codes_{rank}.json").read_text()) for rank in range(2)]
    assert codes[0] == codes[1]
    return list(codes[0])


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(run_dir: Path) -> list[float]:
    """Return the losses exactly as written: JSON preserves every bit of a float."""
    return [record["loss"] for record in metrics(run_dir)]
