"""Helpers that several benchmarks use: checks of options, temporary folders, sample text, child processes."""

import itertools
import json
import multiprocessing
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from z2all_ds.base.child_process import package_environment
from z2all_ds.base.errors import ConfigError

Result = TypeVar("Result")
Report = dict[str, Any]
"""The JSON report of a benchmark: its figures, and the settings that are needed to repeat it."""


def require_at_least(least: int, **given: int) -> None:
    """Raise ConfigError for a number below `least`."""
    for name, value in given.items():
        if value < least:
            raise ConfigError(f"{name}={value}", f"must be at least {least}", "Give more.")


def require_known(kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError for a name that is not in `known`."""
    for name in names:
        if name not in known:
            raise ConfigError(f"{kind} {name!r}", f"no such {kind}", f"Known: {', '.join(known)}.")


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder in `parent`, by default in the system's temporary folder."""
    with tempfile.TemporaryDirectory(prefix="z2all-bench-", dir=parent) as folder:
        yield Path(folder)


def built_in_text(folder: Path, sample_bytes: int) -> str:
    """Build a corpus of code, English and Chinese, up to a third of `sample_bytes` each. Return its folder."""
    from z2all_ds.corpus import SourceSpec, build_corpus

    sources = [("code", "python_code"), ("en", "python_docstrings"), ("zh", "chinese_sample")]
    build_corpus(folder, [SourceSpec(name, converter, max_bytes=sample_bytes // 3) for name, converter in sources])
    return str(folder)


def sample_texts(corpus: str | Path, sample_bytes: int) -> dict[str, list[str]]:
    """Return documents of each domain, by the domain's share of the corpus and spread over the domain."""
    from z2all_ds.tokenizer.sampling import open_sources

    domains = open_sources(corpus, with_fingerprint=False).domains
    total = sum(domain.bytes for domain in domains.values())
    return {
        name: [text for _, text in domain.sample(sample_bytes * domain.bytes // total)]
        for name, domain in domains.items()
    }


def repeated(texts: list[str]) -> Iterator[str]:
    """Yield an endless sequence of different texts."""
    yield from texts
    for number in itertools.count(1):
        yield from (f"{number} {text}" for text in texts)


def median_repeat(repeats: Sequence[dict[str, Any]], by: str) -> dict[str, Any]:
    """Return the repeat whose figure `by` is the median."""
    return sorted(repeats, key=lambda one: one[by])[(len(repeats) - 1) // 2]


def in_new_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """Return the result of a call in a new process, where the peak memory is that of the call."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def run_process(command: Sequence[str], job: Any = None, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command with `job` as JSON on its stdin, and return its exit code and its stdout."""
    options.setdefault("env", package_environment())
    return subprocess.run(command, input=json.dumps(job), stdout=subprocess.PIPE, text=True, **options)


def error_line(output: str) -> str:
    """Return the last line that contains "error", or else the last line. RanksFailed only refers to the line above."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() and not line.startswith("RanksFailed")]
    return (errors or lines or ["no output"])[-1][:300]
