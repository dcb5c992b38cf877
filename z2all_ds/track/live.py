"""A panel that stays at the bottom of a terminal while lines scroll above it.

It is drawn by the caller when a record or a line arrives, not by a thread. Drawing takes at most 1% of the time. The
cursor is never hidden and always below the panel, so a killed process leaves a usable terminal with the last panel on
it. The terminal is opened again in non-blocking mode: if it is stopped by Ctrl-S, slow or closed, frames are lost, but
training does not wait.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from z2all_ds.base.console import printable
from z2all_ds.track.panel import PanelState, render

LEAST_SECONDS_BETWEEN = 0.25
DRAWING_SHARE = 0.01
MOST_WAITING_LINES = 500


def open_terminal(descriptor: int) -> int | None:
    """Open the terminal behind this descriptor again, non-blocking; return None if a panel cannot be shown."""
    if os.environ.get("CI") or os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return None
    try:
        # Not by setting a flag: others, such as the shell, share the open file and expect it to block.
        return os.open(os.ttyname(descriptor), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None


class LivePanel:
    """Draws a state on a terminal. `other_output` changes when another process may have written there."""

    def __init__(self, terminal: int, state: PanelState, other_output: Callable[[], object] = lambda: None) -> None:
        self._terminal, self._state, self._other_output = terminal, state, other_output
        self._seen_output = other_output()
        self._frame: list[int] = []
        """Cells of each row of the panel on the screen."""
        self._waiting: deque[str] = deque(maxlen=MOST_WAITING_LINES)
        self._next_at = 0.0
        self._is_open, self._has_failed = True, False
        self.is_shown = True
        """False in a window that is too small or after a failure: then only lines are printed."""
        self._lock = threading.RLock()
        """Lines also come from threads that save and export."""
        _drawn(state, 80, 24)  # imports rich, which must not count as the cost of the first panel

    def metric(self, record: Mapping[str, Any]) -> None:
        with self._lock, self._guarded():
            self._state.metric(record)
            self._draw_if_due()

    def event(self, event: Mapping[str, Any]) -> None:
        with self._lock, self._guarded():
            self._state.event(event)
            self._draw_if_due()

    def say(self, line: str) -> None:
        """Print a line above the panel."""
        with self._lock, self._guarded():
            self._waiting.append(printable(line))
            self._draw()

    def close(self) -> None:
        """Draw the last state, which stays on the screen."""
        with self._lock:
            with self._guarded():
                self._draw()
            if self._is_open:
                self._is_open = False
                os.close(self._terminal)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """After an error, prints only lines: a panel that cannot be drawn must not end a run."""
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                self._waiting.append(f"panel switched off: {type(error).__name__}: {error}")
            self._has_failed, self.is_shown, self._frame = True, False, []
            with suppress(OSError):
                os.write(self._terminal, "".join(f"{line}\r\n" for line in self._waiting).encode(errors="replace"))
            self._waiting.clear()

    def _draw_if_due(self) -> None:
        self._notice_other_output()
        if time.monotonic() >= self._next_at:
            self._draw()

    def _draw(self) -> None:
        if not self._is_open:
            return
        started = time.monotonic()
        with suppress(OSError):  # the terminal was closed; the log has every line
            self._put(*os.get_terminal_size(self._terminal))
        cost = time.monotonic() - started
        self._next_at = time.monotonic() + max(LEAST_SECONDS_BETWEEN, cost / DRAWING_SHARE)

    def _put(self, width: int, height: int) -> None:
        self._notice_other_output()
        frame, cells = _drawn(self._state, width, height) if not self._has_failed else ("", [])
        self.is_shown = bool(cells)
        lines = "".join(f"{line}\r\n" for line in self._waiting)
        content = f"{self._erase_panel(width)}{lines}{frame}".encode(errors="replace")
        try:
            written = os.write(self._terminal, content)
        except BlockingIOError:
            return
        self._waiting.clear()
        self._frame = cells if written == len(content) else []

    def _notice_other_output(self) -> None:
        """Start a new panel below the output of another process; the old one stays."""
        output = self._other_output()
        if output != self._seen_output:
            self._seen_output, self._frame = output, []

    def _erase_panel(self, width: int) -> str:
        """Return the codes that move to the first row of the panel and erase it."""
        # A terminal that became narrower has wrapped the rows.
        rows = sum(max(1, -(-cells // max(1, width))) for cells in self._frame)
        return f"\r\x1b[{rows}A\x1b[J" if rows else "\r\x1b[K"


def _drawn(state: PanelState, width: int, height: int) -> tuple[str, list[int]]:
    """Return the panel's rows with their colours, and the cells of each. One row is left free for the cursor."""
    from rich.console import Console

    # One cell less than the width: some terminals wrap as soon as the last cell is filled.
    renderable = render(state, width - 1, height - 1)
    if renderable is None:
        return "", []
    console = Console(force_terminal=True, width=width - 1, height=height - 1, highlight=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(renderable)
    rows = captured.get().splitlines()
    return "".join(f"{row}\r\n" for row in rows), [width - 1] * len(rows)
