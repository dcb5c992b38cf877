"""Progress output for long operations: bars on a terminal, occasional lines in logs and CI.

Progress goes to stderr, results to stdout, so that `z2all ... --json > file` stays clean.
"""

import errno
import os
import sys
import threading
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress

PLAIN_LINE_EVERY_SECONDS = 10.0
DIRECTION_MARKS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def is_interactive() -> bool:
    """Return whether a person is watching: stderr is a terminal and this is not CI."""
    return sys.stderr.isatty() and not os.environ.get("CI")


def printable(text: str, keep: str = "\n\t") -> str:
    """Return the text with control characters shown as escapes, except those in `keep`: text from data could control
    the terminal, and characters that change the text direction could hide parts of it."""
    return "".join(one if one in keep or not _is_control(one) else _escaped(one) for one in text)


def fit_for_stdout(text: str) -> str:
    """Return the text as `printable` does if stdout is a terminal, else unchanged: a program may read a pipe."""
    return printable(text) if sys.stdout.isatty() else text


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs") or character in DIRECTION_MARKS


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def say(line: str) -> None:
    """Print one line to stderr in a single write, since other processes may write to the same terminal.

    A line that cannot be shown is dropped and does not end the action that it is about.
    """
    try:
        sys.stderr.write(f"{printable(line)}\n")
        sys.stderr.flush()
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO):  # `| tee log` has ended, or the terminal is closed
            _drop_stderr()


def _drop_stderr() -> None:
    """Send later output to /dev/null: at exit, Python flushes stderr again and ends with code 120 if that fails."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


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


def amount_text(count: float, unit: str, with_unit: bool = True) -> str:
    """Return an amount of bytes or of other things for people."""
    return human_bytes(count) if unit == "bytes" else f"{count:,.0f} {unit if with_unit else ''}".rstrip()


class Advance(Protocol):
    """Advance a bar by `amount`; `note` is shown next to it until the next call."""

    def __call__(self, amount: float, note: str = "") -> None: ...


@contextmanager
def progress(label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
    """Yield `advance(n, note)`. Shows a rich bar with ETA on a terminal, else a line at most every ten seconds."""
    if is_interactive():
        with _bars(unit) as bars:
            task = bars.add_task(printable(label), total=total or None, note="")  # of nothing, no bar at 100%
            yield lambda amount, note="": bars.update(task, advance=amount, note=printable(note))
        return

    started, last, done, last_note = time.monotonic(), time.monotonic(), 0.0, ""

    def advance(amount: float, note: str = "") -> None:
        nonlocal done, last, last_note
        done += amount
        last_note = f", {note}" if note else ""
        now = time.monotonic()
        if now - last >= PLAIN_LINE_EVERY_SECONDS:
            last = now
            share, left = amount_text(done, unit), ""
            if total:
                share = f"{amount_text(done, unit, with_unit=False)} of {amount_text(total, unit)}"
                left = f", {human_seconds((total - done) / done * (now - started))} left" if 0 < done < total else ""
            say(f"{label}: {share}{last_note} ({human_seconds(now - started)}{left})")

    yield advance
    say(f"{label}: {amount_text(done, unit)}{last_note} in {human_seconds(time.monotonic() - started)}")


def _bars(unit: str) -> "Progress":
    """Return a bar with amounts, a note, time and ETA; bytes are shown with their unit."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column
    from rich.text import Text

    class Amount(ProgressColumn):
        """The amount done, of the total if it is known; nothing while there is nothing to say."""

        def render(self, task: Task) -> Text:
            total = f"/{amount_text(task.total, unit)}" if task.total else ""
            speed = f" {human_bytes(task.speed)}/s" if unit == "bytes" and task.speed else ""
            done = amount_text(task.completed, unit, with_unit=not total)
            return Text(f"{done}{total}{speed}" if task.completed or total else "")

    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None, table_column=Column(max_width=40)),  # shrinks on a narrow terminal
        Amount(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[note]}", markup=False),
    ]
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))


@contextmanager
def heartbeat(label: str) -> Iterator[None]:
    """Show a spinner with the elapsed time, or a line every ten seconds, during waits of unknown length."""
    if is_interactive():
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        ) as bars:
            bars.add_task(printable(label), total=None)
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
