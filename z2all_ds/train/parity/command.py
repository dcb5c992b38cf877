"""`z2all train parity`: checks, the reference in a separate process, then a separate run for each JSON."""

import json
import os
import sys
import tempfile
from pathlib import Path

from z2all_ds.base.atomic import write_whole
from z2all_ds.base.child_process import run_group
from z2all_ds.base.config import RunConfig, anchored, dump_yaml, load_run_config
from z2all_ds.base.console import heartbeat, say
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.machine import default_environment, device_type, gpu_count
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.writer import read_records
from z2all_ds.train.command import RanksFailed, default_ranks, train_on_this_machine
from z2all_ds.train.fallback_data import prepare_data
from z2all_ds.train.inputs import check_data
from z2all_ds.train.parity.compare import TOLERANCES, Comparison, JsonOutcome, StepValues
from z2all_ds.train.processes.local_ranks import check_ranks
from z2all_ds.zero.ds_config import resolve

REFERENCE_MODULE = "z2all_ds.train.parity.reference"
ADAMW_KINDS = ("auto", "adamw", "ds_fused_adam", "ds_cpu_adam", "apex_adam")
"""Optimizers that should give the same numbers as torch's AdamW."""


def run_parity(
    config: str | None,
    overrides: list[str],
    stages: str,
    jsons: str,
    ranks: int | None,
    steps: int,
    precision: str,
) -> Comparison:
    """Take the first `steps` steps of the run under each JSON and in plain torch."""
    ranks = default_ranks() if ranks is None else ranks
    run = load_run_config(config, overrides)
    precision = precision or (run.train.precision if run.train.precision != "auto" else "fp32")
    if precision not in TOLERANCES:
        raise ConfigError(f"--precision {precision}", "has no reference", f"Use {' or '.join(TOLERANCES)}.")
    names = chosen_jsons(stages, jsons, precision)
    overrides = [*overrides, *settings(run, steps, precision)]
    check_comparable(load_run_config(config, overrides))
    check_ranks(ranks, gpu_count())
    for name in names:
        resolve(load_run_config(config, [*overrides, f"deepspeed={name}"]), ranks, device_type())
    with tempfile.TemporaryDirectory(prefix="z2all-parity-") as scratch:
        folder = Path(scratch)
        overrides = [*overrides, *prepare_data(config, overrides, folder)]
        run = anchored(load_run_config(config, overrides))
        check_data(run, ranks)
        reference = run_reference(run, steps, folder)
        outcomes = [run_json(run, name, ranks, folder / f"run_{n}") for n, name in enumerate(names)]
    return Comparison(precision, ranks, reference, tuple(outcomes))


def chosen_jsons(stages: str, jsons: str, precision: str) -> list[str]:
    """Return the names of the JSONs, without duplicates; by default every stage that supports the precision."""
    if not stages.strip() and not jsons.strip():
        stages = "1,2,3" if precision == "bf16" else "0,1,2,3"
    names = []
    for stage in _listed(stages):
        if stage not in ("0", "1", "2", "3"):
            raise ConfigError(f"--stages {stages}", f"{stage!r} is not a ZeRO stage", "Use some of 0,1,2,3.")
        names.append(f"zero{stage}")
    names += _listed(jsons)
    return list(dict.fromkeys(names))


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text.strip() else []


def settings(run: RunConfig, steps: int, precision: str) -> list[str]:
    """Return the overrides of every run. The schedule is that of the whole run, but only its first steps are taken."""
    if steps < 1:
        raise ConfigError(f"--steps {steps}", "must be at least 1", "Use the number of steps to compare.")
    return [
        f"train.steps={max(steps, run.train.steps)}",
        f"train.stop_at_step={steps}",
        f"train.precision={precision}",
        f"train.log_every={steps}",
        f"checkpoint.every_steps={steps + 1}",
        "checkpoint.at_end=false",
        "guard.policy=warn",  # every step must be taken
        "track.wandb=disabled",
        "validation.corpus=''",
        "probes.file=''",
        "train.init_from=''",  # the reference initializes its weights randomly
    ]


def check_comparable(run: RunConfig) -> None:
    """Refuse settings that make the numbers depend on more than the arithmetic."""
    for name in ("attention_dropout", "dropout1", "dropout2"):
        if getattr(run.model, name):
            rule = "dropout depends on the number of ranks, so runs never agree"
            raise ConfigError(f"model.{name}={getattr(run.model, name)}", rule, f"Compare with model.{name}=0.")
    if run.optimizer.kind not in ADAMW_KINDS:
        rule = "the reference uses torch's AdamW"
        raise ConfigError(f"optimizer.kind={run.optimizer.kind}", rule, "Compare with optimizer.kind=auto.")


def run_reference(run: RunConfig, steps: int, folder: Path) -> tuple[StepValues, ...]:
    """Run the reference in a separate process: this one stays without torch and leaves all memory to the ranks."""
    config, out = folder / "reference.yaml", folder / "reference.json"
    write_whole(config, dump_yaml(run))
    command = [sys.executable, "-m", REFERENCE_MODULE, "--config", str(config), "--out", str(out)]
    command += ["--steps", str(steps)]
    environment = {**os.environ, **default_environment(ranks=1)}
    with heartbeat(f"reference: {steps} steps in plain torch"):
        code = run_group(command, environment, folder / "reference.log")
    if code:
        raise RanksFailed("the reference in plain torch", f"ended with code {code}", "See the error above.", code)
    return tuple(StepValues(**values) for values in json.loads(out.read_text(encoding="utf-8")))


def run_json(run: RunConfig, name: str, ranks: int, run_dir: Path) -> JsonOutcome:
    """Run the training under one JSON and return the values from its records."""
    say(f"{name}: {ranks} ranks")
    try:
        train_on_this_machine(run.model_copy(update={"run_dir": str(run_dir), "deepspeed": name}), ranks)
    except RanksFailed as error:
        fix = f"See the error above; `z2all train --deepspeed {name}` with the same settings keeps the logs."
        raise RanksFailed(name, f"ended with code {error.exit_code}", fix, error.exit_code) from None
    folder = RunFolder(run_dir)
    environment = json.loads(folder.environment.read_text(encoding="utf-8"))
    values = (StepValues(one["step"], one["loss"], one["grad_norm"]) for one in read_records(folder.metrics))
    return JsonOutcome(name, tuple(values), environment.get("dtypes"))
