"""Draws one panel of a plot: a kind of curves, with marks for events. Imports matplotlib."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from z2all_ds.track.fonts import PlotFonts
from z2all_ds.track.plot_data import Panel, RunCurves
from z2all_ds.track.plot_kinds import KINDS, LOG_PROBES, TIME_PARTS, PlotOptions

DASHES: Sequence[Any] = ("-", "--", ":", "-.", (0, (6, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 3)))
LOG_TICKS = (1.0, 2.0, 3.0, 4.0, 5.0, 7.0)
"""In each power of ten, where a logarithmic axis has a small range."""
MARK_COLOURS = {
    "spike": "#d62728",
    "rollback": "#8c1aff",
    "restart": "#ff7f0e",
    "stage": "#2ca02c",
    "checkpoint": "#7f7f7f",
}
MOST_LEGEND_ROWS_INSIDE, MOST_LEGEND_ROWS = 6, 13
"""With more rows, the legend is next to the panel, which has room for the latter."""
TIME_UNITS = ((86400.0 * 2, 86400.0, "days"), (3600.0 * 2, 3600.0, "hours"), (120.0, 60.0, "minutes"))
TOKEN_UNITS = (
    (2e12, 1e12, "trillions of tokens"),
    (2e9, 1e9, "billions of tokens"),
    (2e6, 1e6, "millions of tokens"),
    (2e3, 1e3, "thousands of tokens"),
)
MOST_X_INTERVALS = 6
"""Room for labels of seven digits in the narrowest panel; matplotlib assumes shorter ones."""


def draw_panel(axes: Axes, panel: Panel, every_run: list[RunCurves], options: PlotOptions, fonts: PlotFonts) -> None:
    """Draw a panel. `every_run` of the plot is given so that a run has the same colour in all panels."""
    kind, runs = panel.kind, panel.runs
    scale, x_label = _x_unit(options.x, runs)
    painter = _Painter(axes, panel, scale, options, fonts)
    if kind == "time":
        painter.areas(runs[0])
    else:
        for run in runs:
            colour = None if len(every_run) == 1 or KINDS[kind].per_run else f"C{every_run.index(run)}"
            painter.lines(run, colour)
    if KINDS[kind].per_run and len(every_run) > 1:
        axes.set_title(_escaped(fonts.drawable(runs[0].name)), fontsize="medium")
    if options.events:
        for run in runs:
            painter.marks(run)
    axes.set(xlabel=x_label, ylabel=panel.label or KINDS[kind].y_label)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.margins(x=0.01)
    axes.locator_params(axis="x", nbins=MOST_X_INTERVALS)
    if panel.label in LOG_PROBES or (options.log and kind not in ("time", "mixture")):
        _make_logarithmic(axes)
    elif kind in ("time", "speed", "grad_norm"):
        painter.cut_outliers()
    _legend(axes, kind)
    if kind == "validation" and len(axes.get_legend_handles_labels()[1]) <= MOST_LEGEND_ROWS_INSIDE:
        _add_perplexity(axes)


def mark_legend(figure: Figure, runs: list[RunCurves]) -> None:
    """Add a legend of the marks below all panels."""
    kinds = [kind for kind in MARK_COLOURS if any(kind in run.marks for run in runs)]
    handles = [Line2D([], [], label=kind, **_mark_style(kind)) for kind in kinds]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


class _Painter:
    """Draws the curves of one panel."""

    def __init__(self, axes: Axes, panel: Panel, scale: float, options: PlotOptions, fonts: PlotFonts) -> None:
        self._axes, self._name, self._kind, self._scale = axes, panel.kind, KINDS[panel.kind], scale
        self._label, self._options, self._fonts = panel.label, options, fonts
        self._values = np.empty(0)

    def lines(self, run: RunCurves, colour: str | None) -> None:
        """Draw the curves of a run. If it has its own colour, dashes distinguish its curves."""
        keys = run.keys_of(self._name, self._label)
        for number, key in enumerate(keys):
            own = f"C{number % 10}" if colour is None else colour
            dashes = DASHES[number // 10 % len(DASHES)] if colour is None else DASHES[number % len(DASHES)]
            label = self._kind.label(key)
            if colour is not None:
                label = f"{run.name}: {label}" if len(keys) > 1 or self._kind.prefix else run.name
            self._line(run, key, own, dashes, label, is_main=number == 0 and key in self._kind.keys)
        if self._name == "mixture":
            self._requested(run, keys)

    def _line(self, run: RunCurves, key: str, colour: str, dashes: Any, label: str, is_main: bool) -> None:
        found = run.curves[key]
        x = found.x / self._scale
        main = run.smoothed.get(key)
        style: dict[str, Any] = {"color": colour, "linestyle": dashes}
        factor = self._kind.factor
        if run.records_per_point > 1 and not self._kind.is_sparse:
            low, high = factor * found.low, factor * found.high
            self._axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
        elif main is not None:
            self._axes.plot(x, factor * found.y, **style, linewidth=0.7, alpha=0.25)
        if main is not None:
            found, x = main, main.x / self._scale
        y = factor * found.y
        self._values = np.append(self._values, y)
        marker = "o" if len(x) == 1 or (self._kind.is_sparse and len(x) <= 100) else None
        width, alpha, order = (1.6, 1.0, 3) if is_main else (1.0, 0.85, 2)
        text = _escaped(self._fonts.drawable(label))
        style |= {"linewidth": width, "alpha": alpha, "zorder": order, "marker": marker, "markersize": 3.5}
        self._axes.plot(x, y, **style, label=text)

    def _requested(self, run: RunCurves, keys: list[str]) -> None:
        """Draw the requested shares, dashed, over the steps of each stage."""
        last_step = run.steps_and_x[0][-1]
        style: dict[str, Any] = {"linestyle": (0, (2, 2)), "linewidth": 1.1}
        ends = [*(stage.first_step for stage in run.requested[1:]), math.inf]
        for stage, end in zip(run.requested, ends, strict=True):
            if stage.first_step > last_step:
                continue
            steps = (stage.first_step, end)
            span = [run.x_of_step(min(max(step, 1), last_step)) / self._scale for step in steps]
            for domain, share in stage.shares.items():
                key = f"{self._kind.prefix}{domain}"
                colour = f"C{keys.index(key) % 10}" if key in keys else "grey"
                self._axes.plot(span, [100 * share] * 2, color=colour, **style)
        if run.requested:
            self._axes.plot([], [], color="grey", label="requested", **style)

    def areas(self, run: RunCurves) -> None:
        """Draw the parts of a step on top of each other; parts that take no time are left out."""
        found = {part: run.smoothed.get(f"{part}_seconds") or run.curves.get(f"{part}_seconds") for part in TIME_PARTS}
        parts = {part: points for part, points in found.items() if points is not None}
        whole = max((points.y.sum() for points in parts.values()), default=0.0)
        length = min(len(points.x) for points in parts.values())
        shown = {part: points for part, points in parts.items() if points.y.sum() > 1e-3 * whole} or parts
        x = next(iter(shown.values())).x[:length] / self._scale
        layers = np.stack([points.y[:length] for points in shown.values()])
        if length == 1:  # the area of one step has no width
            x, layers = np.append(x - 0.5, x + 0.5), np.repeat(layers, 2, axis=1)
        colours = [f"C{TIME_PARTS.index(part)}" for part in shown]
        labels = [part.replace("_", " ") for part in shown]
        self._axes.stackplot(x, layers, labels=labels, colors=colours, alpha=0.75)
        self._values = layers.sum(axis=0)
        sent = run.smoothed.get("communication_seconds") or run.curves.get("communication_seconds")
        if sent is not None and sent.high.any():
            style: dict[str, Any] = {"color": "black", "linewidth": 1.0, "linestyle": "--"}
            self._axes.plot(sent.x / self._scale, sent.y, label="of which communication", **style)

    def marks(self, run: RunCurves) -> None:
        for kind, found in run.marks.items():
            x = [value / self._scale for value in found]
            across = self._axes.get_xaxis_transform()
            order = 5 if kind == "checkpoint" else 4  # the smaller ones stay visible on the larger
            self._axes.plot(x, [0.0] * len(x), transform=across, zorder=order, clip_on=False, **_mark_style(kind))
            if kind != "checkpoint":
                for value in x:
                    self._axes.axvline(value, color=MARK_COLOURS[kind], linewidth=0.8, alpha=0.4, zorder=0.5)

    def cut_outliers(self) -> None:
        """Limit the y-axis: a step with a checkpoint can take a hundred times as long as the others."""
        usual, highest = np.quantile(self._values, [0.98, 1.0], method="lower") if self._values.size else (0.0, 0.0)
        if usual > 0 and highest > 2.5 * usual:
            self._axes.set_ylim(0.0, 1.5 * usual)
            style: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": "x-small", "color": "grey"}
            self._axes.text(1.0, 1.01, f"up to {highest:.3g}", transform=self._axes.transAxes, **style)
        elif self._name != "grad_norm":
            self._axes.set_ylim(bottom=0.0)


def _mark_style(kind: str) -> dict[str, Any]:
    size = 3 if kind == "checkpoint" else 6
    return {"color": MARK_COLOURS[kind], "marker": "^", "markersize": size, "linestyle": "none"}


def _x_unit(x_axis: str, runs: list[RunCurves]) -> tuple[float, str]:
    """Return the divisor of x and the label of its axis."""
    longest = max(run.steps_and_x[1][-1] for run in runs)
    if x_axis == "step":
        return 1.0, "step"
    for least, unit, name in TOKEN_UNITS if x_axis == "tokens" else TIME_UNITS:
        if longest >= least:
            return unit, name
    return 1.0, "tokens" if x_axis == "tokens" else "seconds"


def _make_logarithmic(axes: Axes) -> None:
    """Make the y-axis logarithmic, with plain numbers; a small range also gets ticks between powers of ten."""
    low, high = axes.dataLim.intervaly
    if not 0 < high < math.inf:
        return
    axes.set_yscale("log", nonpositive="mask")
    if low > 0 and high / low < 100:
        axes.yaxis.set_major_locator(LogLocator(subs=LOG_TICKS))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _add_perplexity(axes: Axes) -> None:
    """Add a right axis with the exponential of the loss."""
    right = axes.secondary_yaxis("right")
    right.set_ylabel("perplexity")
    if axes.get_yscale() == "log":  # its ticks are at losses, and only labels of the formatter below are perplexities
        right.yaxis.set_major_locator(LogLocator(subs=LOG_TICKS))
        right.yaxis.set_minor_formatter(NullFormatter())
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{math.exp(min(value, 700.0)):,.4g}"))


def _legend(axes: Axes, kind: str) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > MOST_LEGEND_ROWS_INSIDE:
        if len(labels) > MOST_LEGEND_ROWS:  # else the curves would have no room
            rest = Line2D([], [], linestyle="none", label=f"and {len(labels) - MOST_LEGEND_ROWS + 1} more")
            handles = [*handles[: MOST_LEGEND_ROWS - 1], rest]
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    elif len(labels) > 1 or labels == ["all"] or kind == "probes":
        is_over_areas = kind == "time"
        axes.legend(loc="best", frameon=is_over_areas, framealpha=0.8, ncols=2 if is_over_areas else 1)


def _escaped(name: str) -> str:
    """Escape a name: matplotlib reads text between dollars as a formula, and hides names that begin with _."""
    name = name.replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name
