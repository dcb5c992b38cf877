"""What several measurements share: checks of options, temporary folders, text to measure with, other processes."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from z2all_ds.base.errors import ConfigError


def require_at_least(least: int, **given: int) -> None:
    """Refuses a number below `least`, by its name."""
    for name, value in given.items():
        if value < least:
            raise ConfigError(f"{name}={value}", f"must be at least {least}", "Give more.")


def require_known(kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Refuses a name that is not among the known ones."""
    for name in names:
        if name not in known:
            raise ConfigError(f"{kind} {name!r}", f"no such {kind}", f"Known: {', '.join(known)}.")


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yields a temporary folder in `parent`, or where the system has them."""
    with tempfile.TemporaryDirectory(prefix="z2all-bench-", dir=parent) as folder:
        yield Path(folder)


def built_in_text(folder: Path, sample_bytes: int) -> str:
    """Builds a corpus of code, English and Chinese, up to a third of `sample_bytes` each. Returns its folder."""
    from z2all_ds.corpus import SourceSpec, build_corpus

    sources = [("code", "python_code"), ("en", "python_docstrings"), ("zh", "chinese_sample")]
    build_corpus(folder, [SourceSpec(name, converter, max_bytes=sample_bytes // 3) for name, converter in sources])
    return str(folder)


def middle(repeats: Sequence[dict[str, Any]], by: str) -> dict[str, Any]:
    """Returns the repeat that is in the middle by one of its figures."""
    return sorted(repeats, key=lambda one: one[by])[(len(repeats) - 1) // 2]


def run_process(command: Sequence[str], job: Any = None, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Runs a Python process with `job` as JSON on its stdin, and returns its end and what it printed."""
    return subprocess.run(
        [sys.executable, *command], input=json.dumps(job), stdout=subprocess.PIPE, text=True, **options
    )


def why_ended(returncode: int) -> str:
    """Returns the exit code or the signal of a process, in words."""
    return f"killed by signal {-returncode}" if returncode < 0 else f"exit code {returncode}"


def last_words(output: str) -> str:
    """Returns the line that says most about a failure: the last error, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1][:300]
