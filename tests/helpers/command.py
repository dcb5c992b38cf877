"""The command in tests: real processes, their exit codes, what goes to stdout and what to stderr."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "z2all_ds"]


def environment(**changes: str) -> dict[str, str]:
    """Ours, without what would change the command's ways; wide, so that no help text is folded."""
    dropped = ("Z2ALL_DEBUG", "CI", "CUDA_VISIBLE_DEVICES", "FORCE_COLOR")
    own = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**own, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "", **changes}


def z2all(*arguments: str | Path, cwd: Path, **changes: str) -> "subprocess.CompletedProcess[str]":
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment(**changes), timeout=600)


def one_line(answer: "subprocess.CompletedProcess[str]", code: int) -> str:
    """The only line of a user's mistake: on stderr, with the code of its class."""
    assert answer.returncode == code, answer.stderr
    assert answer.stdout == ""
    (line,) = answer.stderr.splitlines()
    return line
