"""A panel that stays at the foot of a terminal while lines pass above it.

It is drawn by whoever feeds it, when a record or a line comes, and by no thread. Drawing takes at most a hundredth of
the time. The cursor is never hidden and always stands below the panel, so that a process that is killed leaves a
usable terminal with the last panel on it. The terminal is opened anew and never waited for: one that is stopped by
Ctrl-S, slow or gone costs frames, not steps.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from z2all_ds.track.panel import PanelState, render

LEAST_SECONDS_BETWEEN = 0.25
DRAWING_SHARE = 0.01
MOST_WAITING_LINES = 500


def open_terminal(descriptor: int) -> int | None:
    """Another way into the terminal behind this descriptor, one that does not wait; None where a panel cannot be."""
    if os.environ.get("CI") or os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return None
    try:
        # Not by a flag on what is open: others (the shell, too) have the same open file, and count on it to wait.
        return os.open(os.ttyname(descriptor), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None


class LivePanel:
    """Draws a state on a terminal. `others_spoke` changes when another process may have written there."""

    def __init__(self, terminal: int, state: PanelState, others_spoke: Callable[[], object] = lambda: None) -> None:
        self._terminal, self._state, self._others_spoke = terminal, state, others_spoke
        self._spoken = others_spoke()
        self._frame: list[int] = []
        """Cells of each row of the panel that is on the screen."""
        self._waiting: deque[str] = deque(maxlen=MOST_WAITING_LINES)
        self._next_at = 0.0
        self._is_open, self._has_failed = True, False
        self.is_shown = True
        """Else, in a window that is too small or after a failure, there are lines alone."""
        self._turn = threading.RLock()
        """Lines also come from threads that save and export."""
        _drawn(state, 80, 24)  # loads what draws, so that it is not taken for the cost of the first panel

    def metric(self, record: Mapping[str, Any]) -> None:
        with self._turn, self._guarded():
            self._state.metric(record)
            self._draw_if_due()

    def event(self, event: Mapping[str, Any]) -> None:
        with self._turn, self._guarded():
            self._state.event(event)
            self._draw_if_due()

    def say(self, line: str) -> None:
        """Above the panel."""
        with self._turn, self._guarded():
            self._waiting.append(line)
            self._draw()

    def close(self) -> None:
        """The last state stays on the screen."""
        with self._turn:
            with self._guarded():
                self._draw()
            if self._is_open:
                self._is_open = False
                os.close(self._terminal)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A panel that cannot be drawn is a pity, and no reason to end a run: from then on there are lines alone."""
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                self._waiting.append(f"no panel from here on: {type(error).__name__}: {error}")
            self._has_failed, self.is_shown, self._frame = True, False, []
            with suppress(OSError):
                os.write(self._terminal, "".join(f"{line}\r\n" for line in self._waiting).encode(errors="replace"))
            self._waiting.clear()

    def _draw_if_due(self) -> None:
        self._notice_others()
        if time.monotonic() >= self._next_at:
            self._draw()

    def _draw(self) -> None:
        if not self._is_open:
            return
        started = time.monotonic()
        with suppress(OSError):  # the terminal is gone; the log has every line
            self._put(*os.get_terminal_size(self._terminal))
        cost = time.monotonic() - started
        self._next_at = time.monotonic() + max(LEAST_SECONDS_BETWEEN, cost / DRAWING_SHARE)

    def _put(self, width: int, height: int) -> None:
        self._notice_others()
        frame, cells = _drawn(self._state, width, height) if not self._has_failed else ("", [])
        self.is_shown = bool(cells)
        lines = "".join(f"{line}\r\n" for line in self._waiting)
        content = f"{self._way_up(width)}{lines}{frame}".encode(errors="replace")
        try:
            written = os.write(self._terminal, content)
        except BlockingIOError:
            return
        self._waiting.clear()
        self._frame = cells if written == len(content) else []

    def _notice_others(self) -> None:
        """Where they have written below the panel, it stays there, and another begins below their words."""
        spoken = self._others_spoke()
        if spoken != self._spoken:
            self._spoken, self._frame = spoken, []

    def _way_up(self, width: int) -> str:
        """To the first row of the panel, which is wiped."""
        # A terminal that became narrower has folded the rows.
        rows = sum(max(1, -(-cells // max(1, width))) for cells in self._frame)
        return f"\r\x1b[{rows}A\x1b[J" if rows else "\r\x1b[K"


def _drawn(state: PanelState, width: int, height: int) -> tuple[str, list[int]]:
    """The panel's rows with their colours, and the cells of each. A row is left free, where the cursor stands."""
    from rich.console import Console

    # One cell less than there are: some terminals go on to the next row as soon as the last cell is filled.
    renderable = render(state, width - 1, height - 1)
    if renderable is None:
        return "", []
    console = Console(force_terminal=True, width=width - 1, height=height - 1, highlight=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(renderable)
    rows = captured.get().splitlines()
    return "".join(f"{row}\r\n" for row in rows), [width - 1] * len(rows)
