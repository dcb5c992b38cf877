"""Processes that a launch has started (launchers, ranks and data workers), found by a mark in their environment."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

MARK = "Z2ALL_TEST_MARK"
WORKER_WORDS = b"multiprocessing.spawn"


def new_mark() -> dict[str, str]:
    """Return a new mark as a variable for the environment of a launch."""
    return {MARK: uuid4().hex}


def marked(environment: dict[str, str]) -> dict[int, bytes]:
    """Return pid -> command line of all processes that have the mark, except zombies."""
    wanted = f"{MARK}={environment[MARK]}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:  # it has just ended, or belongs to another user
                continue
    return found


def workers(environment: dict[str, str]) -> list[int]:
    return [number for number, command in marked(environment).items() if WORKER_WORDS in command]


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)
