"""Plots for papers and issues, as PNG or SVG: curves of one or more runs.

One file has a panel per kind of curves; a folder gets one file per kind. With one run, colours distinguish domains;
with several, the colour is the run and the dashes are the domain.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from z2all_ds.base.console import say
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.outputs import check_output, check_plot, write_plot
from z2all_ds.base.paths import full_path
from z2all_ds.track.fonts import PlotFonts, fonts_for
from z2all_ds.track.plot_data import Panel, RunCurves, read_run
from z2all_ds.track.plot_kinds import ALL, KINDS, PROBE_LABELS, PlotOptions, chosen_kinds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
ONE_PANEL_INCHES = (8.0, 4.5)
GRID_PANEL_INCHES = (5.6, 3.3)
MOST_INCHES, MOST_PIXELS = 200.0, 20_000
"""matplotlib draws at most 2^16 pixels per side, and programs fail to open images long before that."""


def plot_loss(run_dirs: list[Path], out: Path) -> Path:
    """Plot loss over steps, total and per domain, of one or more runs. Return the file's path."""
    return plot(run_dirs, out, PlotOptions())[0]


def plot(run_dirs: list[Path], out: Path, options: PlotOptions, is_folder: bool = False) -> list[Path]:
    """Plot into one file, or into a folder with one file per kind. Return their paths."""
    is_folder = is_folder or out.is_dir()
    _check(out, options, is_folder)
    kinds = chosen_kinds(options.what)
    names = _names(run_dirs)
    runs = [read_run(path, name, kinds, options.x, options.smooth) for path, name in names.items()]
    kinds = _kinds_there(kinds, runs, asked_for_all=ALL in options.what.split(","))
    fonts = fonts_for(_texts(runs, options.title))
    if fonts.note:
        say(fonts.note)
    panels = {kind: _panels(kind, runs) for kind in kinds}
    if is_folder:
        files = {out / f"{kind}.{options.file_format}": own for kind, own in panels.items()}
    else:
        files = {out: [panel for own in panels.values() for panel in own]}
    for path, own in files.items():
        check_output(path)
        _check_pixels(options.dpi, _size(len(own), options))
    return [_write(path, own, options, fonts) for path, own in files.items()]


def _check(out: Path, options: PlotOptions, is_folder: bool) -> None:
    if not is_folder:
        fix = "Give such a name, or a folder (an existing one, or a name that ends in /) for one file per kind."
        check_plot(out, fix=fix)
    if options.file_format not in FORMATS:
        raise ConfigError(f"--format {options.file_format}", "unknown format", f"Known: {', '.join(FORMATS)}.")
    for name, inches in (("width", options.width), ("height", options.height)):
        if inches is not None and not 1.0 <= inches <= MOST_INCHES:
            raise ConfigError(
                f"--{name} {inches:g}", f"must be 1 to {MOST_INCHES:g} inches", "A page is about 6 inches wide."
            )
    _check_pixels(options.dpi, _size(1, options))  # the smallest possible size, before anything is read


def _check_pixels(dpi: int, inches: tuple[float, float]) -> None:
    most = int(MOST_PIXELS / max(inches))
    if not 10 <= dpi <= most:
        size = f"a plot of {inches[0]:.0f} x {inches[1]:.0f} inches"
        rule = f"must be 10 to {most} for {size}, so that no side has more than {MOST_PIXELS} pixels"
        raise ConfigError(f"--dpi {dpi}", rule, "300 is enough for print; with a folder as --out, files are smaller.")


def _grid(panels: int) -> tuple[int, int]:
    """Return the number of rows and columns."""
    columns = 1 if panels == 1 else 2 if panels <= 4 else 3
    return math.ceil(panels / columns), columns


def _size(panels: int, options: PlotOptions) -> tuple[float, float]:
    """Return width and height in inches."""
    rows, columns = _grid(panels)
    width, height = (GRID_PANEL_INCHES[0] * columns, GRID_PANEL_INCHES[1] * rows) if columns > 1 else ONE_PANEL_INCHES
    return options.width or width, options.height or height


def _names(run_dirs: list[Path]) -> dict[Path, str]:
    """Return the folder name of each run, or its path if two have the same name."""
    short = {path: full_path(path).name or str(path) for path in run_dirs}
    values = list(short.values())
    return {path: name if values.count(name) == 1 else str(path) for path, name in short.items()}


def _kinds_there(kinds: list[str], runs: list[RunCurves], asked_for_all: bool) -> list[str]:
    """Return the kinds that a run has values for. A kind that was asked for by name must exist in some run; runs
    without it are reported."""
    there = [kind for kind in kinds if any(run.keys_of(kind) for run in runs)]
    missing = [kind for kind in kinds if kind not in there]
    if not there or (missing and not asked_for_all):
        known = [kind for kind in KINDS if any(kind in run.kinds_there for run in runs)]
        rule = f"no {', '.join(missing)} in the records"
        raise DataError(", ".join(run.name for run in runs), rule, f"Available: {', '.join(known) or 'none'}.")
    for kind in there if len(runs) > 1 and not asked_for_all else []:
        without = [run.name for run in runs if not run.keys_of(kind)]
        if without:
            say(f"{', '.join(without)}: no {kind} in the records")
    return there


def _texts(runs: list[RunCurves], title: str) -> list[str]:
    requested = [name for run in runs for stage in run.requested for name in stage.shares]
    return [title, *(run.name for run in runs), *(key for run in runs for key in run.curves), *requested]


def _panels(kind: str, runs: list[RunCurves]) -> list[Panel]:
    if kind == "probes":
        labels = dict.fromkeys([*PROBE_LABELS.values(), KINDS[kind].y_label])
        return [Panel(kind, runs, label) for label in labels if any(run.keys_of(kind, label) for run in runs)]
    return [Panel(kind, [run]) for run in runs if run.keys_of(kind)] if KINDS[kind].per_run else [Panel(kind, runs)]


def _write(out: Path, panels: list[Panel], options: PlotOptions, fonts: PlotFonts) -> Path:
    import matplotlib

    style = {
        "font.family": list(fonts.families),
        "svg.fonttype": "path",  # looks the same whatever fonts the reader has
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.fontsize": "small",
    }
    with matplotlib.rc_context(style):
        return write_plot(_figure(panels, options, fonts), out)


def _figure(panels: list[Panel], options: PlotOptions, fonts: PlotFonts) -> "Figure":
    # Not pyplot, which needs a display and keeps figures until they are closed.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from z2all_ds.track.plot_axes import draw_panel, mark_legend

    (rows, columns), size = _grid(len(panels)), _size(len(panels), options)
    figure = Figure(figsize=size, dpi=options.dpi, layout=ConstrainedLayoutEngine(wspace=0.05, hspace=0.05))
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    every_run = list({run.name: run for panel in panels for run in panel.runs}.values())
    for axes, panel in zip(grid, panels, strict=False):
        draw_panel(axes, panel, every_run, options, fonts)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    if options.events:
        mark_legend(figure, every_run)
    if options.title:
        figure.suptitle(fonts.drawable(options.title).replace("$", r"\$"))
    return figure
