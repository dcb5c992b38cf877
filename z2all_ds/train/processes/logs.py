"""Output of a rank: everything goes to logs/rank_NNNN.log, selected lines of rank 0 also to the terminal.

DeepSpeed, torch and compilers write to stdout and stderr directly, so the file descriptors themselves are redirected.
"""

import os
import sys
import time
from contextlib import suppress

from z2all_ds.base.atomic import open_own
from z2all_ds.base.console import printable
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.world import World
from z2all_ds.track.live import LivePanel, open_terminal
from z2all_ds.track.panel import PanelState


class RankOutput:
    """Redirects stdout and stderr of this process."""

    def __init__(self, folder: RunFolder, world: World) -> None:
        self._rank = world.rank
        self._is_main = world.is_main
        self._folder = folder
        self._is_one_machine = world.local_world_size == world.world_size
        self._panel: LivePanel | None = None
        self._stops_asked, self._was_asked = 0, False
        self._log_path = folder.rank_log(world.rank)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._terminal = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="replace")
        log = open_own(self._log_path, os.O_WRONLY | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def show_panel(self, title: str, steps: int, step: int) -> LivePanel | None:
        """On rank 0, show a panel instead of step lines if this machine has an interactive terminal."""
        terminal = open_terminal(self._terminal.fileno()) if self._is_main and self._is_one_machine else None
        if terminal is not None:
            self._panel = LivePanel(terminal, PanelState(title, steps, step), self._others_spoke)
        return self._panel

    def say(self, line: str) -> None:
        """Write a line to the log; on rank 0 also to the terminal."""
        self._to_log(line)
        if self._panel:
            self._panel.say(line)
        elif self._is_main:
            self._to_terminal(line)

    def say_step(self, line: str) -> None:
        """Write a step's line; skipped on the terminal while a panel is shown."""
        if self._panel and self._panel.is_shown:
            self._to_log(line)
        else:
            self.say(line)

    def close_panel(self) -> None:
        """Close the panel; later lines are printed below it."""
        if self._panel:
            self._panel.close()
            self._panel = None

    def fail(self, text: str, show: bool) -> None:
        """Write the reason why this rank ends: all of it to the log, one line to the terminal."""
        with suppress(OSError):  # the disk may be full
            print(printable(text), file=sys.stderr, flush=True)
        self.close_panel()
        if show:
            last_line = text.strip().splitlines()[-1]
            where = "" if text.strip() == last_line and self._is_main else f" (rank {self._rank}; see {self._log_path})"
            self._to_terminal(last_line + where)

    def _to_log(self, line: str) -> None:
        with suppress(OSError):  # a full disk loses log lines, but does not end the run
            print(f"{time.strftime('%H:%M:%S')} {printable(line)}", file=sys.stderr, flush=True)

    def _others_spoke(self) -> tuple[int, int]:
        """Return whether a stop was requested and how many ranks have recorded a fault."""
        is_asked = self._folder.stop_request.exists()
        self._stops_asked += is_asked and not self._was_asked
        self._was_asked = is_asked
        faults = os.listdir(self._folder.faults) if self._folder.faults.is_dir() else []
        return self._stops_asked, len(faults)

    def _to_terminal(self, line: str) -> None:
        with suppress(OSError):  # the terminal may be gone (closed pipe, lost ssh session); the log has the line
            self._terminal.write(printable(line) + "\n")
