"""Progress output for long operations: bars on a terminal, occasional lines in logs and CI.

Progress goes to stderr, results to stdout, so that `z2all ... --json > file` stays clean.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress

PLAIN_LINE_EVERY_SECONDS = 10.0


def is_interactive() -> bool:
    """Return whether a person is watching: stderr is a terminal and this is not CI."""
    return sys.stderr.isatty() and not os.environ.get("CI")


def say(line: str) -> None:
    """Print one line to stderr in a single write, since other processes may write to the same terminal."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


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


class Advance(Protocol):
    """Advance a bar by `amount`; `note` is shown next to it until the next call."""

    def __call__(self, amount: float, note: str = "") -> None: ...


@contextmanager
def progress(label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
    """Yield `advance(n, note)`. Shows a rich bar with ETA on a terminal, else a line at most every ten seconds."""
    if is_interactive():
        with _bars(unit) as bars:
            task = bars.add_task(label, total=total, note="")
            yield lambda amount, note="": bars.update(task, advance=amount, note=note)
        return

    started, last, done, last_note = time.monotonic(), time.monotonic(), 0.0, ""

    def amount_of(count: float, with_unit: bool = True) -> str:
        return human_bytes(count) if unit == "bytes" else f"{count:,.0f} {unit if with_unit else ''}".rstrip()

    def advance(amount: float, note: str = "") -> None:
        nonlocal done, last, last_note
        done += amount
        last_note = f", {note}" if note else ""
        now = time.monotonic()
        if now - last >= PLAIN_LINE_EVERY_SECONDS:
            last = now
            share, left = amount_of(done), ""
            if total:
                share = f"{amount_of(done, with_unit=False)} of {amount_of(total)}"
                left = f", {human_seconds((total - done) / done * (now - started))} left" if 0 < done < total else ""
            say(f"{label}: {share}{last_note} ({human_seconds(now - started)}{left})")

    yield advance
    say(f"{label}: {amount_of(done)}{last_note} in {human_seconds(time.monotonic() - started)}")


def _bars(unit: str) -> "Progress":
    """Return a bar with amounts, a note, time and ETA; bytes are shown with unit and speed."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amounts: list[ProgressColumn] = [MofNCompleteColumn(), TextColumn(unit)]
    if unit == "bytes":
        amounts = [DownloadColumn(binary_units=True), TransferSpeedColumn()]
    columns = [TextColumn("{task.description}"), BarColumn(), *amounts, TextColumn("{task.fields[note]}")]
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))


@contextmanager
def heartbeat(label: str) -> Iterator[None]:
    """Show a spinner with the elapsed time, or a line every ten seconds, during waits of unknown length."""
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
