"""`z2all checkpoint ...`"""

from pathlib import Path
from typing import Annotated

import typer

from z2all_ds.base.reports import print_lines, print_report
from z2all_ds.cli.options import ConfigOption, JsonOption, Overrides

checkpoint_app = typer.Typer(no_args_is_help=True, help="Look at checkpoints, take over others' and delete old ones.")
PathArgument = Annotated[Path, typer.Argument(help="Run folder, or one checkpoint's folder.")]


@checkpoint_app.command("list")
def list_checkpoints(path: PathArgument, as_json: JsonOption = False) -> None:
    """Step, size, shape, optimizer, data position and health (by sizes) of a run's checkpoints."""
    from z2all_ds.checkpoint.report import describe, look_at

    print_report(look_at(path, verify_checksums=False), as_json, describe)


@checkpoint_app.command()
def show(path: PathArgument, as_json: JsonOption = False) -> None:
    """Everything that can be told of one checkpoint, or of a run's newest."""
    from z2all_ds.checkpoint.report import describe_one, look_at

    print_report(look_at(path, verify_checksums=False)[-1:], as_json, describe_one)


@checkpoint_app.command()
def verify(path: PathArgument, as_json: JsonOption = False) -> None:
    """Read every byte against its checksum; ends with code 4 where one is damaged."""
    from z2all_ds.checkpoint.report import describe, look_at, refuse_damage

    found = look_at(path, verify_checksums=True)
    print_report(found, as_json, describe)
    refuse_damage(found)


@checkpoint_app.command()
def prune(
    run: Annotated[Path, typer.Argument(help="Run folder that no job is using.")],
    keep_last: Annotated[int | None, typer.Option(min=2, help="Newest ones to keep (default: as in run.yaml).")] = None,
    keep_every: Annotated[int | None, typer.Option(min=0, help="Keep those of every so many steps too.")] = None,
    keep_best: Annotated[
        int | None, typer.Option(min=0, help="Keep so many of the lowest validation loss too.")
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Also what a killed run has left in this memory.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete checkpoints that are not to be kept, and what cut-off saves have left; says why the others stay."""
    from z2all_ds.checkpoint.pruning import describe, prune_by_hand

    print_report(prune_by_hand(run, dry_run, keep_last, keep_every, keep_best, memory), as_json, describe)


@checkpoint_app.command("import")
def import_checkpoint(
    source: Annotated[Path, typer.Argument(help="Folder DeepSpeed's save_checkpoint wrote into, or one tag's in it.")],
    run: Annotated[Path | None, typer.Option(help="Run folder to go on in; its run.yaml says the run.")] = None,
    config: ConfigOption = None,
    overrides: Overrides = None,
) -> None:
    """Make a checkpoint of a run from what DeepSpeed's own engine.save_checkpoint wrote, bit for bit."""
    from z2all_ds.zero.state.import_command import import_deepspeed

    print_lines(import_deepspeed(source, run, config, overrides or []).lines)
