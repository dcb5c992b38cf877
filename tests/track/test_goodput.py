"""Goodput, worked out by hand on a run that was stopped, lost a step and went on."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.goodput import Goodput, goodput, goodput_so_far
from z2all_ds.track.writer import RunWriter


def event(time_unix: float, kind: str, **details: Any) -> dict[str, Any]:
    return {"time_unix": time_unix, "event": kind, **details}


def step(time_unix: float, number: int, seconds: float, waited: float = 0.0, checkpoint: float = 0.0) -> dict[str, Any]:
    parts = {"step_seconds": seconds, "data_wait_seconds": waited, "checkpoint_seconds": checkpoint}
    return {"step": number, **parts, "time_unix": time_unix}


# The process begins at 100 and needs 10 s up to its first step. Steps 1 and 2 end at 112 and 114, of which 0.5 s were
# spent waiting for data; a checkpoint ends at 117; step 3 ends at 119 and the process dies. The next begins at 130,
# needs 9 s, takes step 3 again (to 141), then step 4 (to 143), and ends with a checkpoint of 3 s at 146.
EVENTS = [
    event(109.9, "started", step=0),
    event(112.0, "first_step", step=1, seconds=12.0, first_step_seconds=2.0),
    event(117.0, "saved", step=2, seconds=3.0),
    event(138.8, "started", step=2),
    event(138.9, "metrics_dropped", records=1, after_step=2),
    event(141.0, "first_step", step=3, seconds=11.0, first_step_seconds=2.0),
    event(146.0, "saved", step=4, seconds=3.0),
]
METRICS = [step(112.0, 1, 2.0), step(114.0, 2, 2.0, waited=0.5), step(141.0, 3, 2.0), step(143.0, 4, 2.0)]


def test_only_steps_that_counted_count() -> None:
    used = goodput(EVENTS, METRICS)
    assert used == Goodput(
        wall_seconds=46.0,
        counted_seconds=7.5,
        startup_seconds=19.0,
        checkpoint_seconds=6.0,
        data_wait_seconds=0.5,
        validation_seconds=0.0,
    )
    assert used.share == 7.5 / 46
    assert used.lost_seconds == 13.0  # step 3 for the first time, and 119 to 130
    assert used.line() == "goodput 16.3% of 46s (start-up 19s, checkpoints 6s, waiting for data 0s, lost 13s)"


def test_a_checkpoint_before_a_step_is_no_part_of_it() -> None:
    """Step 3 goes on in the same process: its 5 s begin where step 2 ended."""
    used = goodput(EVENTS[:3], [*METRICS[:2], step(119.0, 3, 5.0, checkpoint=3.0)])
    assert (used.wall_seconds, used.counted_seconds, used.checkpoint_seconds) == (19.0, 5.5, 3.0)
    assert used.lost_seconds == 0


def test_steps_that_were_left_out_and_validation_do_not_count() -> None:
    left_out = {**METRICS[1], "step_taken": False, "validation_seconds": 0.25}
    validated = {**METRICS[3], "step_taken": True, "validation_seconds": 1.0}
    used = goodput(EVENTS, [METRICS[0], left_out, METRICS[2], validated])
    assert (used.counted_seconds, used.data_wait_seconds, used.validation_seconds) == (5.0, 0.5, 1.25)
    assert used.lost_seconds == 13.0 + 1.25  # and step 2


def test_while_it_runs_the_wall_time_goes_on() -> None:
    assert goodput(EVENTS, METRICS, now_unix=150.0).wall_seconds == 50.0


def test_a_run_without_records_has_no_goodput() -> None:
    assert goodput([], []) == Goodput(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert goodput([], []).share == 0.0


def test_records_of_before_have_no_parts() -> None:
    old = [{"step": 1, "step_seconds": 2.0, "time_unix": 112.0}]
    used = goodput([event(110.0, "started", step=0)], old)
    assert (used.wall_seconds, used.counted_seconds) == (2.0, 2.0)
    assert used.line() == "goodput 100.0% of 2s"


@given(
    st.lists(st.tuples(*[st.floats(0.01, 10) for _ in range(3)]), min_size=1, max_size=20),
    st.floats(0, 100),
    st.floats(0, 100),
)
def test_parts_never_exceed_the_whole(steps: list[tuple[float, float, float]], startup: float, down: float) -> None:
    """Any sequence of steps in one process, each (computing, waiting, checkpoint before it)."""
    first = sum(steps[0])
    now = 1000.0 + startup + first
    events = [event(now, "first_step", step=1, seconds=startup + first, first_step_seconds=first)]
    metrics = []
    for number, (computing, waited, checkpoint) in enumerate(steps):
        now += sum((computing, waited, checkpoint)) if number else 0.0
        events.append(event(now, "saved", seconds=checkpoint))
        metrics.append(step(now, number + 1, computing + waited + checkpoint, waited, checkpoint))
    used = goodput(events, metrics, now_unix=now + down)
    assert 0 <= used.share <= 1 + 1e-9
    assert used.counted_seconds == pytest.approx(sum(computing for computing, _, _ in steps))
    assert used.lost_seconds == pytest.approx(down, abs=1e-6)


def test_it_is_read_from_the_runs_own_files(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    writer = RunWriter(folder)
    writer.event("first_step", step=1, seconds=20.0, first_step_seconds=5.0)
    writer.metric(step(0.0, 1, 5.0))
    writer.close()
    used = goodput_so_far(folder)
    assert used.wall_seconds == pytest.approx(20.0, abs=1.0)
    assert (used.counted_seconds, used.startup_seconds) == (5.0, 15.0)
