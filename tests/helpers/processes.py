"""Real processes in tests: guaranteed cleanup, and a check for open files."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def has_open(pid: int, path: Path) -> bool:
    """Return whether the process has this file open now."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(link) == str(path):
                return True
        except FileNotFoundError:  # closed meanwhile
            continue
    return False
