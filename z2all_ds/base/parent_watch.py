"""Ends this process when its owner is gone, so that a kill -9 of the command leaves no ranks behind.

The DeepSpeed launcher does not notice the death of its parent, and ranks do not notice that of the launcher. So the
command that starts them puts its process id into the environment, and every rank watches that process.
"""

import os
import signal
import threading
import time

from z2all_ds.base.errors import EXIT_INTERRUPTED
from z2all_ds.base.machine import process_is_alive, process_start_time

OWNER_VARIABLE = "Z2ALL_OWNER"
CHECK_EVERY_SECONDS = 0.5


def owner_mark() -> str:
    """Return the value of OWNER_VARIABLE for this process: its pid and start time, since pids are reused."""
    return f"{os.getpid()}:{process_start_time(os.getpid())}"


def follow_owner(mark: str | None = None) -> None:
    """Start watching the owner named by `mark`, by default the one in the environment.

    Do nothing without an owner: a plain `deepspeed` launch has none.
    """
    mark = os.environ.get(OWNER_VARIABLE, "") if mark is None else mark
    pid, _, started = mark.partition(":")
    if not pid.isdigit():
        return
    start_time = int(started) if started.isdigit() else None

    def watch() -> None:
        while process_is_alive(int(pid), start_time):
            time.sleep(CHECK_EVERY_SECONDS)
        if os.getpid() == os.getpgrp():
            # As leader of the group, end its other processes, too. SIGTERM, so that ninja ends its compilers: they have
            # their own groups and would run on for a minute after a SIGKILL of ninja.
            os.killpg(0, signal.SIGTERM)
        # Not sys.exit: other threads may be inside a collective that will never end.
        os._exit(EXIT_INTERRUPTED)

    threading.Thread(target=watch, name="owner-watch", daemon=True).start()
