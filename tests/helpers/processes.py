"""Real processes in tests, ended whatever happens."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()
