"""Where a rank's words go: everything into logs/rank_NNNN.log, the chosen lines of rank 0 also onto the terminal.

DeepSpeed, torch and compilers write to the process's stdout and stderr as they please, so the redirection is done on
the file descriptors and catches all of it.
"""

import os
import sys
import time
from contextlib import suppress

from z2all_ds.run_folder import RunFolder
from z2all_ds.world import World


class RankOutput:
    """Takes over stdout and stderr of this process."""

    def __init__(self, folder: RunFolder, world: World) -> None:
        self._rank = world.rank
        self._is_main = world.is_main
        self._log_path = folder.rank_log(world.rank)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._terminal = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="replace")
        log = os.open(self._log_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def say(self, line: str) -> None:
        """A line for the log; from rank 0 for the terminal too."""
        print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
        if self._is_main:
            self._to_terminal(line)

    def fail(self, text: str, show: bool) -> None:
        """The reason this rank ends: whole in the log; one line on the terminal."""
        print(text, file=sys.stderr, flush=True)
        if show:
            last_line = text.strip().splitlines()[-1]
            where = "" if text.strip() == last_line and self._is_main else f" (rank {self._rank}; see {self._log_path})"
            self._to_terminal(last_line + where)

    def _to_terminal(self, line: str) -> None:
        with suppress(OSError):  # the terminal may be gone (a closed pipe, a lost ssh session); the log has the line
            self._terminal.write(line + "\n")
