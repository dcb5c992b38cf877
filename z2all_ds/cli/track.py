"""The verbs of `z2all track`."""

from pathlib import Path
from typing import Annotated

import typer

from z2all_ds.cli.verbs import Verbs

track_app = Verbs(no_args_is_help=True, help="Send records of runs to W&B and TensorBoard.")


@track_app.command()
def sync(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    to: Annotated[str, typer.Option(help="Tracker: wandb or tensorboard.")] = "wandb",
    project: Annotated[str | None, typer.Option(help="W&B project (default: the run's).")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Write W&B's offline files instead of sending.")] = False,
) -> None:
    """Send the records that a tracker is missing, of runs that trained offline or while it failed."""
    from z2all_ds.track.sinks.sync import sync_runs

    sync_runs(runs, to, project, offline)
