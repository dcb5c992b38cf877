"""Progress output: occasional lines in logs, a bar on a (pseudo-)terminal, and nothing on stdout."""

import io
import os
import pty
import re
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from z2all_ds.base import console

SHOW = """
from z2all_ds.base import console
with console.progress("reading", total=3, unit="files") as advance:
    for _ in range(3):
        advance(1)
with console.heartbeat("compiling"):
    pass
console.say("said")
print("interactive" if console.is_interactive() else "plain")
"""


SAY_AND_GO_ON = """
from z2all_ds.base.console import say
for _ in range(2):
    say("nobody reads this")
print("went on")
"""


@pytest.mark.parametrize("reader", ["pipe", "terminal"])
def test_a_line_that_nobody_can_read_does_not_end_the_command(reader: str) -> None:
    """As in `z2all train ... 2>&1 | tee log` after Ctrl-C, and at the end of an ssh session."""
    ours, theirs = os.pipe() if reader == "pipe" else pty.openpty()
    os.close(ours)
    done = subprocess.run([sys.executable, "-c", SAY_AND_GO_ON], stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    assert (done.returncode, done.stdout) == (0, "went on\n")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (-2048, "-2.0 KiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 50, "3072.0 TiB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert console.human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (9.4, "9s"), (59.6, "1m00s"), (65, "1m05s"), (3599.6, "1h00m"), (3725, "1h02m")]
)
def test_human_seconds(seconds: float, text: str) -> None:
    assert console.human_seconds(seconds) == text


@given(st.integers(0, 10**6))
def test_human_seconds_never_shows_sixty(seconds: int) -> None:
    text = console.human_seconds(seconds)
    assert "60" not in text.partition("h")[2]
    assert not text.endswith("60s")


def without_times(text: str) -> str:
    """Replace durations, which vary between machines."""
    return re.sub(r"\b\d+s", "Ns", text)


def test_progress_prints_plain_lines_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with console.progress("reading", total=3, unit="files") as advance:
        advance(1)
        advance(2)
    with console.heartbeat("compiling"):
        pass
    out, err = capfd.readouterr()
    assert out == ""
    assert without_times(err) == "reading: 3 files in Ns\ncompiling ...\n"


def test_long_operations_print_a_line_at_regular_intervals(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "PLAIN_LINE_EVERY_SECONDS", 0.01)
    with console.progress("reading", total=2000, unit="files") as advance:
        time.sleep(0.02)
        advance(1500)
    with console.progress("counting", unit="words") as advance:
        time.sleep(0.02)
        advance(7)
    assert without_times(capfd.readouterr().err).splitlines() == [
        "reading: 1,500 of 2,000 files (Ns, Ns left)",
        "reading: 1,500 files in Ns",
        "counting: 7 words (Ns)",
        "counting: 7 words in Ns",
    ]
    seen = ""
    with console.heartbeat("compiling"):
        while without_times(seen).count("compiling ... Ns\n") < 2:
            seen += capfd.readouterr().err
            time.sleep(0.01)
    assert seen.startswith("compiling ...\n")


def test_an_error_inside_a_heartbeat_is_raised() -> None:
    with pytest.raises(ValueError, match="broken"), console.heartbeat("compiling"):
        raise ValueError("broken")


def show_on_a_terminal(environment: dict[str, str]) -> tuple[str, str]:
    """Return stdout, and stderr as received by a pseudo-terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", SHOW]
    clean = {key: value for key, value in os.environ.items() if key not in ("CI", "NO_COLOR", "TERM")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, text=True, env={**clean, "TERM": "xterm", **environment}
    ) as process:
        os.close(theirs)
        seen = b""
        try:
            while block := os.read(ours, 65536):
                seen += block
        except OSError:  # raised by Linux when the other end is closed
            pass
        os.close(ours)
        assert process.stdout
        return process.stdout.read(), seen.decode()


def test_progress_shows_a_bar_on_a_terminal() -> None:
    out, seen = show_on_a_terminal({})
    assert out == "interactive\n"
    assert "3/3" in seen
    assert "━" in seen
    assert "compiling" in seen
    assert seen.endswith("said\r\n")


def test_progress_shows_no_bar_in_continuous_integration() -> None:
    out, seen = show_on_a_terminal({"CI": "true"})
    assert out == "plain\n"
    assert without_times(seen) == "reading: 3 files in Ns\r\ncompiling ...\r\nsaid\r\n"


def test_progress_in_bytes_shows_sizes_and_a_note(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "PLAIN_LINE_EVERY_SECONDS", 0.01)
    with console.progress("corpus", total=4096, unit="bytes") as advance:
        time.sleep(0.02)
        advance(1536, "12 records")
    assert without_times(capfd.readouterr().err).splitlines() == [
        "corpus: 1.5 KiB of 4.0 KiB, 12 records (Ns, Ns left)",
        "corpus: 1.5 KiB, 12 records in Ns",
    ]


@pytest.mark.parametrize(
    ("total", "unit", "done", "shown"),
    [
        (0, "bytes", 0, ""),
        (None, "bytes", 0, ""),
        (None, "bytes", 1536, "1.5 KiB"),
        (4096, "bytes", 1536, "1.5 KiB/4.0 KiB"),
        (3, "files", 0, "0/3 files"),
        (None, "files", 2, "2 files"),
    ],
)
def test_a_bar_shows_only_amounts_that_are_known(total: float | None, unit: str, done: float, shown: str) -> None:
    with console._bars(unit) as bars:
        bars.update(bars.add_task("x", total=total or None, note=""), completed=done)
        (task,) = bars.tasks
        assert str(bars.columns[2](task)).strip() == shown  # type: ignore[operator]


@pytest.mark.parametrize("width", [80, 200])
def test_a_bar_takes_one_line(width: int) -> None:
    terminal = Console(width=width, file=(shown := io.StringIO()))
    with console._bars("bytes") as bars:
        bars.add_task("evaluate ppl: model on data", total=10.4 * 2**20, completed=1234567, note="")
        terminal.print(bars.get_renderable())
    (line,) = shown.getvalue().splitlines()
    assert "1.2 MiB/10.4 MiB" in line
    assert line.endswith(" 0:00:00 -:--:--")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain 中文\tand\nlines", "plain 中文\tand\nlines"),
        ("\x1b[2J\x07\r\x9b", "\\x1b[2J\\x07\\r\\x9b"),
        ("a\u202eb\ud800", "a\\u202eb\\ud800"),
    ],
)
def test_control_characters_are_shown_as_escapes(text: str, shown: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert console.printable(text) == shown
    assert console.printable("a\nb", keep="") == "a\\nb"
    console.say(text)
    assert capfd.readouterr().err == f"{shown}\n"
