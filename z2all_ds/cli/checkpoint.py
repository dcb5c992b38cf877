"""The verbs of `z2all checkpoint`."""

from pathlib import Path
from typing import Annotated

import typer

from z2all_ds.base.reports import print_lines, print_report
from z2all_ds.cli.options import ConfigOption, JsonOption, Overrides
from z2all_ds.cli.verbs import Verbs

checkpoint_app = Verbs(no_args_is_help=True, help="List, verify, import and delete checkpoints.")
PathArgument = Annotated[Path, typer.Argument(help="Run folder or checkpoint folder.")]


@checkpoint_app.command("list")
def list_checkpoints(path: PathArgument, as_json: JsonOption = False) -> None:
    """List the checkpoints of a run: step, size, JSON and ranks, optimizer, data position, health (by file sizes)."""
    from z2all_ds.checkpoint.report import describe, inspect

    print_report(inspect(path, verify_checksums=False), as_json, describe)


@checkpoint_app.command()
def show(path: PathArgument, as_json: JsonOption = False) -> None:
    """Show all details of one checkpoint, or of the newest of a run."""
    from z2all_ds.checkpoint.report import describe_one, inspect

    print_report(inspect(path, verify_checksums=False)[-1:], as_json, describe_one)


@checkpoint_app.command()
def verify(path: PathArgument, as_json: JsonOption = False) -> None:
    """Check every byte against its checksum; exit code 4 if a checkpoint is damaged."""
    from z2all_ds.checkpoint.report import describe, inspect, require_intact

    found = inspect(path, verify_checksums=True)
    print_report(found, as_json, describe)
    require_intact(found)


@checkpoint_app.command()
def prune(
    run: Annotated[Path, typer.Argument(help="Run folder; no job may be using it.")],
    keep_last: Annotated[
        int | None, typer.Option(min=2, help="Number of newest checkpoints to keep (default: from run.yaml).")
    ] = None,
    keep_every: Annotated[int | None, typer.Option(min=0, help="Also keep steps that are a multiple of N.")] = None,
    keep_best: Annotated[
        int | None, typer.Option(min=0, help="Also keep the N with the lowest validation loss.")
    ] = None,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory",
            help="Also free in-memory snapshots of a killed run, and of runs whose folder was moved or deleted.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete old checkpoints and the remains of interrupted saves; show why the others are kept."""
    from z2all_ds.checkpoint.pruning import describe, prune_run

    report = prune_run(run, dry_run, memory, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
    print_report(report, as_json, describe)


@checkpoint_app.command("import")
def import_checkpoint(
    source: Annotated[Path, typer.Argument(help="Folder written by DeepSpeed's save_checkpoint, or one tag's folder.")],
    run: Annotated[Path | None, typer.Option(help="Run folder to continue in; its run.yaml is the config.")] = None,
    config: ConfigOption = None,
    overrides: Overrides = None,
) -> None:
    """Convert a checkpoint written by DeepSpeed's engine.save_checkpoint to a checkpoint of a run, bit for bit."""
    from z2all_ds.zero.state.import_deepspeed import import_deepspeed

    print_lines(import_deepspeed(source, run, config, overrides or []))
