"""Content of the terminal panel of a run, made from its records and events, for any width and height.

`live.py` draws it on a terminal.
"""

import math
import time
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from z2all_ds.base.console import human_bytes, human_seconds, printable
from z2all_ds.track.fields import LOSS_PREFIX, event_title

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
CURVE_POINTS = 256
WINDOW_STEPS = 50
"""Steps that the remaining time is estimated from."""
LAST_EVENTS = 3
LEAST_WIDTH, LEAST_HEIGHT = 20, 5
FRAME_ROWS = 2
NAME_CELLS = 16
HIDDEN_EVENTS = ("saved", "metrics_dropped", "first_step")
"""They belong to other events that are shown."""


class MeanCurve:
    """A curve of any length in at most CURVE_POINTS means of equally many values."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self._values_per_mean, self._last_count = 1, 1

    def add(self, value: float) -> None:
        if self._last_count < self._values_per_mean:
            self._last_count += 1
            self.means[-1] += (value - self.means[-1]) / self._last_count
            return
        if len(self.means) == CURVE_POINTS:
            self.means = [(first + second) / 2 for first, second in zip(self.means[::2], self.means[1::2], strict=True)]
            self._values_per_mean *= 2
        self.means.append(value)
        self._last_count = 1


class PanelState:
    """The content of the panel; gets records and events as they are written."""

    def __init__(self, title: str, steps: int, first_step: int = 0, now_unix: float | None = None) -> None:
        self.title, self.steps, self.step = printable(title, keep=""), steps, first_step
        self.last: dict[str, Any] = {}
        self.validation: tuple[int, float] | None = None
        self.curves: dict[str, MeanCurve] = {}
        self.events: deque[str] = deque(maxlen=LAST_EVENTS)
        self._began_unix = time.time() if now_unix is None else now_unix
        self._times: deque[tuple[int, float]] = deque(maxlen=WINDOW_STEPS + 1)

    def metric(self, record: Mapping[str, Any]) -> None:
        step = int(record["step"])
        if step <= self.step:  # the run went back
            self.curves.clear()
            self._times.clear()
            self.last.clear()
            if self.validation and self.validation[0] >= step:
                self.validation = None
        self.step = step
        self._times.append((step, record["time_unix"]))
        for key, value in record.items():
            if (key == "loss" or key.startswith(LOSS_PREFIX)) and value is not None and math.isfinite(value):
                self.curves.setdefault(key, MeanCurve()).add(value)
        self.last.update(record)
        if record.get("validation_loss") is not None:
            self.validation = (step, record["validation_loss"])

    def event(self, event: Mapping[str, Any]) -> None:
        if event["event"] not in HIDDEN_EVENTS:
            moment, title = time.strftime("%H:%M:%S", time.localtime(event["time_unix"])), event_title(event)
            at = f" at step {event['step']:,}" if isinstance(event.get("step"), int) and "step" not in title else ""
            self.events.append(printable(f"{moment} {title}{at}", keep=""))

    @property
    def elapsed_seconds(self) -> float:
        return max(0.0, self._times[-1][1] - self._began_unix) if self._times else 0.0

    @property
    def remaining_seconds(self) -> float | None:
        if len(self._times) < 2:
            return None
        (first_step, first_time), (last_step, last_time) = self._times[0], self._times[-1]
        return (self.steps - self.step) * (last_time - first_time) / max(1, last_step - first_step)


def render(state: PanelState, width: int, height: int) -> "RenderableType | None":
    """Return the panel in at most `width` cells and `height` rows; None if that is too small."""
    from rich.box import ROUNDED
    from rich.console import Group
    from rich.panel import Panel

    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        return None
    inside, most = width - 4, height - FRAME_ROWS
    losses, figures = _losses(state, inside), _figures(state, inside)
    events = [_line(text, inside, style="dim") for text in state.events]
    del events[: max(0, len(events) - max(0, most - len(figures) - 2))]  # progress and one loss come first
    room = max(0, most - 1 - len(figures) - len(events))
    if len(losses) > room:
        hidden = len(losses) - room + 1
        losses = [*losses[: room - 1], _line(f"{hidden} more domains", inside, style="dim")] if room > 1 else losses[:1]
    rows = [_progress(state, inside), *losses, *figures, *events][:most]
    return Panel(Group(*rows), box=ROUNDED, title=_line(state.title, inside - 2), title_align="left", width=width)


def _progress(state: PanelState, width: int) -> "Text":
    from rich.text import Text

    share = min(1.0, state.step / state.steps) if state.steps else 0.0
    left = state.remaining_seconds
    head = f"step {state.step:,}/{state.steps:,} {100 * share:.0f}%"
    times = f"ETA {human_seconds(left) if left is not None else '-'}"
    past = f"elapsed {human_seconds(state.elapsed_seconds)}"
    after = next((text for text in (f"{times} · {past}", times, "") if len(head) + len(text) + 2 <= width), "")
    bar = width - len(head) - len(after) - 2
    text = Text(head, no_wrap=True, overflow="ellipsis")
    if bar >= 8:
        filled = round(share * bar)
        text.append(" ").append("━" * filled, style="green").append("─" * (bar - filled), style="bright_black")
    text.append(f" {after}")
    text.truncate(width, overflow="ellipsis")
    return text


def _losses(state: PanelState, width: int) -> list["Text"]:
    from rich.cells import cell_len, set_cell_size
    from rich.text import Text

    names = {key: printable(key.removeprefix(LOSS_PREFIX), keep="") for key in sorted(state.curves)}
    widest = min(NAME_CELLS, max(4, width // 4), max((cell_len(name) for name in names.values()), default=4))
    rows = []
    for key in sorted(names, key=lambda key: (key != "loss", key)):
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(set_cell_size(names[key], widest), style="bold" if key == "loss" else "")
        text.append(f" {state.last[key]:8.4f} " if state.last.get(key) is not None else f" {'-':>8} ")
        text.append(
            sparkline(state.curves[key].means, max(0, width - text.cell_len)), style="cyan" if key == "loss" else "blue"
        )
        text.truncate(width, overflow="ellipsis")
        rows.append(text)
    return rows


def _figures(state: PanelState, width: int) -> list["Text"]:
    """Return rows of figures, as many per row as fit."""
    last, parts = state.last, list[str]()
    if not last:
        return [_line("waiting for the first step", width, style="dim")]
    parts.append(f"{last['tokens_per_second']:,.0f} tok/s")
    if last.get("mfu") is not None:
        parts.append(f"MFU {100 * last['mfu']:.1f}%")
    parts.append(f"mem {human_bytes(last['memory_bytes'])} (peak {human_bytes(last['peak_memory_bytes'])})")
    parts.append(f"lr {last['lr']:.2e}")
    parts.append(f"grad {last['grad_norm']:.3f}" if last.get("grad_norm") is not None else "grad -")
    if state.validation:
        parts.append(f"validation {state.validation[1]:.4f} (step {state.validation[0]:,})")
    rows, row = list[str](), ""
    for part in parts:
        if row and len(row) + 3 + len(part) > width:
            rows.append(row)
            row = part
        else:
            row = f"{row} · {part}" if row else part
    return [_line(row, width) for row in [*rows, row]]


def sparkline(values: list[float], width: int) -> str:
    """Return one character per value or mean of several. The highest tenth is cut off: the first fall of a loss would
    flatten the rest."""
    if not values or width <= 0:
        return ""
    if len(values) > width:
        borders = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(borders)]
    low, high = min(values), sorted(values)[int(0.9 * (len(values) - 1))]
    if high <= low:
        return BLOCKS[0] * len(values)
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[min(top, round((value - low) / (high - low) * top))] for value in values)


def _line(content: str, width: int, style: str = "") -> "Text":
    from rich.text import Text

    text = Text(content, style=style, no_wrap=True, overflow="ellipsis")
    text.truncate(width, overflow="ellipsis")
    return text
