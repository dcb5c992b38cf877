"""Writes the run config with the JSON and micro-batch that were chosen."""

from pathlib import Path

from z2all_ds.base.atomic import explain_disk_errors, make_folder, write_whole
from z2all_ds.base.config import RunConfig, dump_yaml
from z2all_ds.base.config.stages import run_stages
from z2all_ds.base.console import say
from z2all_ds.base.errors import ConfigError
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
    run = chosen_run(plan)
    make_folder(path.parent)
    try:
        with explain_disk_errors(path.parent):
            write_whole(path, dump_yaml(run))
    except OSError as error:
        raise ConfigError(f"--write {path}", f"cannot be written ({error.strerror})", "Give another place.") from None
    say(f"wrote {path}: {first.name}, micro-batches of {first.micro_batch}; start it with --config {path}")


def chosen_run(plan: Plan) -> RunConfig:
    """The first choice, with the best interval between checkpoints, and steps for --tokens."""
    first = plan.ranked[0]
    checkpoint, train = first.run.checkpoint, first.run.train
    if plan.outlook:
        checkpoint = checkpoint.model_copy(update={"every_steps": plan.outlook.interval_steps})
    if plan.tokens:
        train = train.model_copy(update={"steps": -(-plan.tokens // first.tokens_per_step)})
    run = first.run.model_copy(update={"checkpoint": checkpoint, "train": train})
    run_stages(run)  # whose steps must still fit in
    return run
