"""What a picture shows, and how its curves are drawn."""

from dataclasses import dataclass

from z2all_ds.track.plot_data import RunCurves


@dataclass(frozen=True)
class PlotOptions:
    """How curves are drawn."""

    what: str = "loss"
    """Kinds of curves with commas between them, or `all`."""
    x: str = "step"
    log: bool = False
    smooth: float = 0.0
    """Share of the past that the moving average keeps with each step."""
    events: bool = True
    title: str = ""
    width: float | None = None
    """Inches, as are heights; None chooses by the number of panels."""
    height: float | None = None
    dpi: int = 120
    file_format: str = "png"
    """Of the files in a folder."""


@dataclass(frozen=True)
class PanelPlan:
    """One panel: a kind of curves of these runs."""

    kind: str
    runs: list[RunCurves]
    label: str | None = None
    """Of probes: those with such values."""
