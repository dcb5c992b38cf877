"""Ends this process when the one that ordered it is gone, so that a kill -9 of the command leaves no ranks behind.

The deepspeed launcher does not notice the death of its parent, nor do its ranks that of the launcher. So the command
that starts them puts its process number into the environment, and every rank looks after it.
"""

import os
import signal
import threading
import time

from z2all_ds.base.errors import EXIT_INTERRUPTED
from z2all_ds.base.machine import process_is_alive, process_start_time

OWNER_VARIABLE = "Z2ALL_OWNER"
LOOK_EVERY_SECONDS = 0.5


def owner_mark() -> str:
    """What an owner puts into OWNER_VARIABLE: its number and start time, since numbers are used again."""
    return f"{os.getpid()}:{process_start_time(os.getpid())}"


def follow_owner(mark: str | None = None) -> None:
    """Starts the watch, if an owner is named; nothing otherwise (a plain `deepspeed` launch owns itself).

    The mark comes from the environment unless it is given.
    """
    mark = os.environ.get(OWNER_VARIABLE, "") if mark is None else mark
    pid, _, started = mark.partition(":")
    if not pid.isdigit():
        return
    start_time = int(started) if started.isdigit() else None

    def watch() -> None:
        while process_is_alive(int(pid), start_time):
            time.sleep(LOOK_EVERY_SECONDS)
        if os.getpid() == os.getpgrp():
            # Leader of its group: takes along what it has started. By SIGTERM, on which ninja ends its compilers; they
            # have groups of their own, and a SIGKILL of ninja would leave them at work for a minute.
            os.killpg(0, signal.SIGTERM)
        # Not sys.exit: other threads may be inside a collective that will never end.
        os._exit(EXIT_INTERRUPTED)

    threading.Thread(target=watch, name="owner-watch", daemon=True).start()
