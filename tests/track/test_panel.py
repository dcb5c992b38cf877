"""Rows of the panel at several sizes, from records like those of a run."""

import io
import re
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from z2all_ds.track.panel import CURVE_POINTS, MeanCurve, PanelState, render, sparkline

BEGAN = 1_800_000_000.0


def record(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 8.0 / step,
        "loss_of_中文网页": 9.0 / step,
        "grad_norm": 0.5,
        "lr": 3e-4,
        "tokens_per_second": 75_441.2,
        "mfu": 0.569,
        "memory_bytes": 38 << 30,
        "peak_memory_bytes": 40 << 30,
        "time_unix": BEGAN + 10 + 2.0 * step,
        **more,
    }


def state_after(steps: int, **more: Any) -> PanelState:
    state = PanelState("a run", 100, now_unix=BEGAN)
    for step in range(1, steps + 1):
        state.metric(record(step, **more))
    return state


def rows(state: PanelState, width: int = 100, height: int = 30) -> list[str]:
    shown = render(state, width, height)
    assert shown is not None
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system=None).print(shown)
    return out.getvalue().splitlines()


def test_the_panel_shows_progress_losses_speed_and_events() -> None:
    state = state_after(20, validation_loss=1.25)
    state.event({"event": "checkpoint", "time_unix": BEGAN, "step": 20, "path": "step_00000020", "write_seconds": 3.21})
    state.event({"event": "spike", "time_unix": BEGAN, "step": 20, "policy": "skip"})
    text = "\n".join(rows(state))
    assert "a run" in text
    assert "step 20/100 20%" in text
    assert "ETA 2m40s · elapsed 50s" in text  # 80 steps of 2 s remain; 10 s of start-up
    assert "loss       0.4000 █" in text
    assert "中文网页   0.4500 █" in text
    for part in ("75,441 tok/s", "MFU 56.9%", "mem 38.0 GiB (peak 40.0 GiB)", "lr 3.00e-04", "grad 0.500"):
        assert part in text
    assert "validation 1.2500 (step 20)" in text
    assert "checkpoint step_00000020" in text
    assert "spike: skip at step 20" in text


def test_the_panel_before_the_first_step() -> None:
    text = "\n".join(rows(PanelState("a run", 100)))
    assert "step 0/100 0%" in text
    assert "ETA -" in text
    assert "waiting for the first step" in text


def test_missing_values_are_shown_as_dashes_or_left_out() -> None:
    state = state_after(3)
    state.metric(record(4, loss=float("nan"), grad_norm=None, mfu=None))
    assert len(state.curves["loss"].means) == 3 and rows(state)
    state.metric(record(5, loss=None, grad_norm=None, mfu=None))
    text = "\n".join(rows(state))
    assert re.search(r"loss +- █", text)
    assert "grad -" in text
    assert "MFU" not in text


@pytest.mark.parametrize("domains", [0, 3, 60])
@pytest.mark.parametrize(("width", "height"), [(200, 50), (100, 30), (80, 24), (60, 12), (40, 24), (24, 8), (20, 5)])
def test_the_panel_is_never_larger_than_the_terminal(width: int, height: int, domains: int) -> None:
    more = {f"loss_of_{'中文' * (number % 12)}{number}": 1.0 for number in range(domains)}
    state = state_after(30, validation_loss=1.0, **more)
    for step in range(5):
        state.event({"event": "rolled_back", "time_unix": BEGAN, "step": step, "from_step": 12})
    found = rows(state, width, height)
    assert len(found) <= height
    assert {cell_len(row) for row in found} == {width}
    assert "step 30" in found[1]
    assert "loss" in found[2]


def test_domains_that_do_not_fit_are_counted() -> None:
    state = state_after(30, **{f"loss_of_{number:02d}": 1.0 for number in range(60)})
    found = rows(state, 80, 24)
    shown = [row for row in found if row[2:4].isdigit() and "1.0000" in row]
    assert f"{61 - len(shown)} more domains" in "\n".join(found)  # 61: all records here have one more domain


@pytest.mark.parametrize(("width", "height"), [(19, 24), (80, 4), (0, 0)])
def test_a_terminal_that_is_too_small_gets_no_panel(width: int, height: int) -> None:
    assert render(state_after(3), width, height) is None


def test_a_run_that_goes_back_starts_new_curves() -> None:
    state = state_after(30)
    state.metric(record(31, validation_loss=9.0, of_later_steps=1.0))
    state.metric(record(11))
    assert state.step == 11
    assert state.validation is None and "of_later_steps" not in state.last
    assert state.curves["loss"].means == [8.0 / 11]
    assert state.remaining_seconds is None


def test_escape_codes_and_markup_in_names_are_shown_as_text() -> None:
    text = "\n".join(rows(state_after(2, **{"loss_of_a\x1b[2Jb\n": 1.0, "loss_of_[red]c": 1.0})))
    assert "a\\x1b[2Jb\\n" in text
    assert "[red]c" in text
    assert "\x1b[2J" not in text


def test_sparklines() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([1.0], 0) == ""
    assert sparkline([5.0, 5.0], 10) == "▁▁"
    assert sparkline([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 8.0], 9) == "▁▂▃▄▅▆▇██"
    assert sparkline([float(i) for i in range(1000)], 5) == "▁▃▆██"
    assert sparkline([1000.0, *[2.0, 1.0] * 10], 21)[1:3] == "█▁"


def test_a_long_curve_has_few_points() -> None:
    curve = MeanCurve()
    for value in range(1000):
        curve.add(value)
    assert len(curve.means) == 1000 / 4 <= CURVE_POINTS
    assert curve.means == [4 * number + 1.5 for number in range(250)]
