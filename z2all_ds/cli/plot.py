"""The verb `z2all plot`."""

from pathlib import Path
from typing import Annotated

import typer

from z2all_ds.base.reports import print_lines
from z2all_ds.cli.options import refuse_without_effect


def plot(
    context: typer.Context,
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[
        str | None,
        typer.Option(help="A .png or .svg, or a folder for one file per kind (default: plots/ of the first run)."),
    ] = None,
    what: Annotated[
        str,
        typer.Option(
            help="Comma-separated list of loss, validation, lr, grad_norm, speed, mfu, time, memory, mixture, probes; "
            "or all."
        ),
    ] = "loss",
    x: Annotated[str, typer.Option(help="X-axis: step, tokens or time.")] = "step",
    log: Annotated[bool, typer.Option("--log", help="Logarithmic y-axis.")] = False,
    smooth: Annotated[
        float, typer.Option(help="Moving average: 0 (none) to 0.999; raw curves stay visible, faint.")
    ] = 0.0,
    events: Annotated[bool, typer.Option(help="Mark spikes, rollbacks, checkpoints, restarts and stages.")] = True,
    title: Annotated[str, typer.Option(help="Title of the plot.")] = "",
    width: Annotated[float | None, typer.Option(help="Width in inches.")] = None,
    height: Annotated[float | None, typer.Option(help="Height in inches.")] = None,
    dpi: Annotated[int, typer.Option(help="Dots per inch of a PNG.")] = 120,
    file_format: Annotated[str, typer.Option("--format", help="Format of files in a folder: png or svg.")] = "png",
) -> None:
    """Plot the curves of one or more runs."""
    from z2all_ds.base.run_folder import RunFolder
    from z2all_ds.track.plot_kinds import PlotOptions
    from z2all_ds.track.plots import plot as draw

    is_folder = (out or "").endswith("/")
    if out and not is_folder and not Path(out).is_dir() and Path(out).suffix != f".{file_format}":
        refuse_without_effect(context, ["file_format"], "the name of --out gives the format")
    options = PlotOptions(what, x, log, smooth, events, title, width, height, dpi, file_format)
    name = "_".join(part.strip() for part in what.split(","))
    path = Path(out) if out else RunFolder(runs[0]).plots / f"{name}.{file_format}"
    print_lines(map(str, draw(runs, path, options, is_folder=is_folder)))
