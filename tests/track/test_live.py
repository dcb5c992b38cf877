"""The live panel on a real pseudo-terminal."""

import os
import re
from collections.abc import Iterator

import pytest

from tests.helpers.screen import Terminal, lines_on_screen
from tests.track.test_panel import record
from z2all_ds.track import live
from z2all_ds.track.live import LivePanel, open_terminal
from z2all_ds.track.panel import PanelState


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(live, "LEAST_SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(live, "DRAWING_SHARE", 1e9)
    found = Terminal(80, 24)
    yield found
    found.close()


def panel_on(terminal: Terminal, others: list[str] | None = None) -> LivePanel:
    descriptor = open_terminal(terminal.theirs)
    assert descriptor is not None
    return LivePanel(descriptor, PanelState("a run", 100), lambda: len(others or []))


def test_lines_scroll_above_a_single_panel(terminal: Terminal) -> None:
    panel = panel_on(terminal)
    for step in range(1, 6):
        panel.metric(record(step))
        panel.say(f"words of step {step}")
    panel.close()
    terminal.read(1)
    lines = lines_on_screen(terminal.seen)
    assert lines[:5] == [f"words of step {step}" for step in range(1, 6)]
    assert lines[5].startswith("╭─ a run ")
    assert "step 5/100" in lines[6]
    assert lines[-2].startswith("╰─")
    assert lines[-1] == ""  # the cursor is here, where a shell prints its prompt
    assert "?25" not in terminal.seen, "the cursor was hidden"


def test_lines_cannot_control_the_terminal(terminal: Terminal) -> None:
    panel = panel_on(terminal)
    panel.say("loss of \x1b]0;title\x07")
    panel.close()
    terminal.read(1)
    assert lines_on_screen(terminal.seen)[0] == "loss of \\x1b]0;title\\x07"


def test_output_of_other_processes_is_not_overwritten(terminal: Terminal) -> None:
    others: list[str] = []
    panel = panel_on(terminal, others)
    panel.metric(record(1))
    os.write(terminal.theirs, b"SIGINT: stopping\n")
    others.append("spoke")
    panel.metric(record(2))
    panel.metric(record(3))
    panel.close()
    terminal.read(1)
    lines = lines_on_screen(terminal.seen)
    assert lines.count("SIGINT: stopping") == 1
    before, after = (lines[: lines.index("SIGINT: stopping")], lines[lines.index("SIGINT: stopping") :])
    assert [line for line in before if "step 1/100" in line]
    assert [line for line in after if "step 3/100" in line]
    assert not [line for line in after if "step 2/100" in line]


def test_output_of_other_processes_between_two_drawings_is_noticed(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LEAST_SECONDS_BETWEEN", 3600.0)
    others = ["spoke"]
    panel = panel_on(terminal, others)
    panel.metric(record(1))
    os.write(terminal.theirs, b"SIGINT: stopping\n")
    others.append("spoke again")
    panel.metric(record(2))  # too early to draw; `others` has its old length again at the next drawing
    others.pop()
    panel.close()
    terminal.read(1)
    assert lines_on_screen(terminal.seen).count("SIGINT: stopping") == 1


def test_a_narrower_window_is_filled_and_the_wrapped_rows_are_erased(terminal: Terminal) -> None:
    panel = panel_on(terminal)
    panel.metric(record(1))
    rows = terminal.read(1).count("\r\n")
    terminal.resize(40, 24)
    panel.metric(record(2))
    drawn = terminal.read(1)
    assert drawn.startswith(f"\r\x1b[{2 * rows}A\x1b[J")
    # A Chinese name has 4 double-width characters.
    assert {len(line) for line in lines_on_screen(drawn) if line} == {39 - 4, 39}
    panel.close()


def test_a_window_too_small_for_the_panel_still_shows_lines(terminal: Terminal) -> None:
    terminal.resize(10, 3)
    panel = panel_on(terminal)
    panel.metric(record(1))
    assert not panel.is_shown
    panel.say("words")
    terminal.resize(80, 24)
    panel.say("more")
    assert panel.is_shown
    panel.close()
    terminal.read(1)
    assert lines_on_screen(terminal.seen)[:2] == ["words", "more"]


def test_a_stopped_terminal_does_not_block_the_run(terminal: Terminal) -> None:
    panel = panel_on(terminal)
    for step in range(1, 300):  # nothing reads the terminal: the kernel buffers only a few panels
        panel.metric(record(step))
    panel.say("said while it was stopped")
    while terminal.read(0.1):
        pass
    panel.metric(record(300))
    panel.close()
    terminal.read(1)
    assert "said while it was stopped" in terminal.seen
    assert "step 300/100" in terminal.seen


def test_a_closed_terminal_causes_no_error(terminal: Terminal) -> None:
    gone = Terminal(80, 24)
    panel = panel_on(gone)
    panel.metric(record(1))
    gone.close()
    panel.metric(record(2))
    panel.say("nobody hears it")
    panel.close()
    panel.say("nor this")
    assert "step 2/100" not in gone.seen


def test_the_panel_is_drawn_once_per_interval_and_on_close(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LEAST_SECONDS_BETWEEN", 3600.0)
    panel = panel_on(terminal)
    for step in range(1, 50):
        panel.metric(record(step))
    assert len(re.findall("╭", terminal.read(1))) == 1
    panel.close()
    assert "step 49/100" in terminal.read(1)


@pytest.mark.parametrize("variables", [{"CI": "true"}, {"TERM": "dumb"}, {"TERM": ""}])
def test_no_panel_in_ci_or_on_a_dumb_terminal(
    terminal: Terminal, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert open_terminal(terminal.theirs) is None


def test_a_pipe_is_not_a_terminal(terminal: Terminal) -> None:
    ours, theirs = os.pipe()
    assert open_terminal(theirs) is None
    os.close(ours)
    os.close(theirs)


def test_a_record_that_cannot_be_shown_ends_the_panel_but_not_the_run(terminal: Terminal) -> None:
    panel = panel_on(terminal)
    panel.metric(record(1))
    panel.metric({"step": 2})
    assert not panel.is_shown
    panel.metric(record(3))
    panel.say("the run goes on")
    panel.close()
    terminal.read(1)
    lines = [line for line in lines_on_screen(terminal.seen) if line and line[0] not in "╭│╰"]
    assert lines == ["panel switched off: KeyError: 'time_unix'", "the run goes on"]
