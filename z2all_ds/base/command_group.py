"""A command and all it starts, as one group of processes that is gone when we are done with it.

The group gets its own session, so that Ctrl-C reaches only us; we then end all of it in order. Should we be killed
outright, the group ends by itself: it is told who its owner is (see lifeline.py).
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from z2all_ds.base.machine import group_is_alive
from z2all_ds.base.parent_watch import OWNER_VARIABLE, owner_mark

GRACE_SECONDS = 8.0
"""Between the polite signal and the last one, and at most so long again for the last one to work."""


def run_group(command: list[str], environment: Mapping[str, str], log: Path, *, stderr_to_log: bool = False) -> int:
    """Runs a command to its end and returns its exit code; stdout goes to `log`, stderr too or to our own."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env={**environment, OWNER_VARIABLE: owner_mark()},
            stdout=file,
            stderr=subprocess.STDOUT if stderr_to_log else None,
            start_new_session=True,
        )
        try:
            return process.wait()
        finally:
            end_group(process)


def end_group(process: subprocess.Popen[Any]) -> None:
    """No process of the launcher's session is left when this returns; a second Ctrl-C makes it immediate."""
    try:
        _end_with(process.pid, signal.SIGTERM)
    finally:
        _end_with(process.pid, signal.SIGKILL)
        process.wait()


def _end_with(group: int, number: signal.Signals) -> None:
    """Sends the signal and waits for its effect: even after SIGKILL a process lives on for some milliseconds."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)
    deadline = time.monotonic() + GRACE_SECONDS
    while group_is_alive(group) and time.monotonic() < deadline:
        time.sleep(0.02)
