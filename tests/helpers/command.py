"""The command `z2all` in tests: real processes with their exit codes, stdout and stderr."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "z2all_ds"]


def environment(**changes: str) -> dict[str, str]:
    """Return our environment without variables that change the command, and wide, so that no help text is wrapped."""
    dropped = ("Z2ALL_DEBUG", "CI", "CUDA_VISIBLE_DEVICES", "FORCE_COLOR")
    own = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**own, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "", **changes}


def z2all(*arguments: str | Path, cwd: Path, **changes: str) -> "subprocess.CompletedProcess[str]":
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment(**changes), timeout=600)


def one_line(answer: "subprocess.CompletedProcess[str]", code: int) -> str:
    """Return the only line of an error; it must be on stderr, with this exit code."""
    assert answer.returncode == code, answer.stderr
    assert answer.stdout == ""
    (line,) = answer.stderr.splitlines()
    return line
