"""Writes the run config with the JSON and micro-batch that were chosen."""

from pathlib import Path

from z2all_ds.atomic import machine_limits_named, make_folder, write_whole
from z2all_ds.config import dump_yaml
from z2all_ds.console import say
from z2all_ds.errors import ConfigError
from z2all_ds.plan.report import Plan


def check_name(path: Path) -> None:
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--write {path}", "must end in .yaml", "Give such a name.")
    if path.exists():
        raise ConfigError(f"--write {path}", "is there already", "Remove it, or give another name.")


def write_choice(plan: Plan, path: Path) -> None:
    """Every setting written out, as a run writes it into its folder. A file that is there stays as it is."""
    if not plan.ranked:
        raise ConfigError(f"--write {path}", "nothing fits, so there is nothing to write", plan.words[0])
    check_name(path)
    first = plan.ranked[0]
    checkpoint = first.run.checkpoint
    if plan.outlook:
        checkpoint = checkpoint.model_copy(update={"every_steps": plan.outlook.interval_steps})
    make_folder(path.parent)
    with machine_limits_named(path.parent):
        write_whole(path, dump_yaml(first.run.model_copy(update={"checkpoint": checkpoint})))
    say(f"wrote {path}: {first.name}, micro-batches of {first.micro_batch}; start it with --config {path}")
