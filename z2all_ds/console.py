"""What a person sees while something takes long: bars on a terminal, a sparse line in logs and CI, never silence.

Progress goes to stderr, results to stdout, so that `z2all ... --json > file` stays clean.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PLAIN_LINE_EVERY_SECONDS = 10.0


def is_interactive() -> bool:
    """A person is watching: stderr is a terminal and this is not CI."""
    return sys.stderr.isatty() and not os.environ.get("CI")


def say(line: str) -> None:
    """One line for the person watching."""
    print(line, file=sys.stderr, flush=True)


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """3725 -> '1h02m', 65 -> '1m05s', 9 -> '9s'."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


@contextmanager
def progress(label: str, total: float | None = None, unit: str = "") -> Iterator[Callable[[float], None]]:
    """Yields `advance(n)`. On a terminal a rich bar with ETA; elsewhere a line at most every ten seconds."""
    if is_interactive():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit)]
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bars:
            task = bars.add_task(label, total=total)
            yield lambda n: bars.advance(task, n)
        return

    started, last, done = time.monotonic(), time.monotonic(), 0.0

    def advance(n: float) -> None:
        nonlocal done, last
        done += n
        now = time.monotonic()
        if now - last >= PLAIN_LINE_EVERY_SECONDS:
            last = now
            share = f"{done:,.0f}/{total:,.0f}" if total else f"{done:,.0f}"
            say(f"{label}: {share} {unit} ({human_seconds(now - started)})")

    yield advance
    say(f"{label}: {done:,.0f} {unit} in {human_seconds(time.monotonic() - started)}")


@contextmanager
def heartbeat(label: str) -> Iterator[None]:
    """For waits of unknown length (a compiler, an install): a spinner with the time, or a line every ten seconds."""
    if is_interactive():
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        with Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=Console(stderr=True)
        ) as bars:
            bars.add_task(label, total=None)
            yield
        return

    started, over = time.monotonic(), threading.Event()

    def beat() -> None:
        while not over.wait(PLAIN_LINE_EVERY_SECONDS):
            say(f"{label} ... {human_seconds(time.monotonic() - started)}")

    say(f"{label} ...")
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
