"""Goodput, calculated by hand for a run that was killed, lost a step and resumed."""

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


# The process starts at 100 s and needs 10 s until its first step begins. Steps 1 and 2 end at 112 and 114; 0.5 s of
# step 2 are spent waiting for data. A checkpoint ends at 117, step 3 ends at 119, then the process dies. The next
# process starts at 130, needs 9 s, repeats step 3 (until 141), runs step 4 (until 143), and ends with a checkpoint of
# 3 s at 146.
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


def test_goodput_counts_a_repeated_step_once() -> None:
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
    assert used.lost_seconds == 13.0  # the first attempt at step 3 (2 s), and 119 to 130 (11 s)
    assert used.line() == "goodput 16.3% of 46s (start-up 19s, checkpoints 6s, waiting for data 0s, lost 13s)"


def test_a_checkpoint_before_a_step_is_not_counted_as_part_of_it() -> None:
    """Step 3 follows in the same process: its 5 s begin when step 2 ends and include the checkpoint."""
    used = goodput(EVENTS[:3], [*METRICS[:2], step(119.0, 3, 5.0, checkpoint=3.0)])
    assert (used.wall_seconds, used.counted_seconds, used.checkpoint_seconds) == (19.0, 5.5, 3.0)
    assert used.lost_seconds == 0


def test_skipped_steps_and_validation_do_not_count() -> None:
    left_out = {**METRICS[1], "step_taken": False, "validation_seconds": 0.25}
    validated = {**METRICS[3], "step_taken": True, "validation_seconds": 1.0}
    used = goodput(EVENTS, [METRICS[0], left_out, METRICS[2], validated])
    assert (used.counted_seconds, used.data_wait_seconds, used.validation_seconds) == (5.0, 0.5, 1.25)
    assert used.lost_seconds == 13.0 + 1.25  # the computing time of the skipped step 2


def test_the_wall_time_of_an_active_run_lasts_until_now() -> None:
    assert goodput(EVENTS, METRICS, now_unix=150.0).wall_seconds == 50.0


def test_a_run_without_records_has_no_goodput() -> None:
    assert goodput([], []) == Goodput(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert goodput([], []).share == 0.0


def test_starting_a_finished_run_again_does_not_change_its_goodput() -> None:
    """A day later, a process finds the run finished and ends; a step would make the day lost time."""
    done = [*EVENTS, event(146.5, "done", step=4, goodput=0.16)]
    used = goodput(done, METRICS)
    again = [event(86546.0, "started", step=4), event(86547.0, "done", step=4)]
    assert goodput([*done, *again, *again], METRICS) == used
    assert used.wall_seconds == 46.5
    longer = [
        *again,
        event(86550.0, "started", step=4),
        event(86556.0, "first_step", seconds=9.0, first_step_seconds=1),
    ]
    assert goodput([*done, *longer], METRICS).wall_seconds == 86456.0


def test_failed_attempts_to_start_a_run_are_not_part_of_its_wall_time() -> None:
    """They happen a day before its first start, or a day after its last stop."""
    failed = [event(10.0, "fault"), event(10.1, "failed", step=0), event(20.0, "failed", step=0), event(21.0, "fault")]
    assert goodput(failed, []) == Goodput(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert goodput([*failed, *EVENTS], METRICS) == goodput(EVENTS, METRICS)
    stopped = [*EVENTS, event(146.5, "stopped", step=4)]
    later = event(86546.0, "failed", step=4)
    assert goodput([*failed, *stopped, later, later], METRICS) == goodput(stopped, METRICS)


def test_older_records_without_details_are_accepted() -> None:
    old = [{"step": 1, "step_seconds": 2.0, "time_unix": 112.0}]
    used = goodput([event(110.0, "started", step=0)], old)
    assert (used.wall_seconds, used.counted_seconds) == (2.0, 2.0)
    assert used.line() == "goodput 100.0% of 2s"


@given(
    st.lists(st.tuples(*[st.floats(0.01, 10) for _ in range(3)]), min_size=1, max_size=20),
    st.floats(0, 100),
    st.floats(0, 100),
)
def test_computing_time_counts_and_only_downtime_is_lost(
    steps: list[tuple[float, float, float]], startup: float, down: float
) -> None:
    """All steps are in one process; each is (computing, waiting, checkpoint before it), in seconds."""
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


def test_goodput_is_read_from_the_files_of_a_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    writer = RunWriter(folder)
    writer.event("first_step", step=1, seconds=20.0, first_step_seconds=5.0)
    writer.metric(step(0.0, 1, 5.0))
    writer.close()
    used = goodput_so_far(folder)
    assert used.wall_seconds == pytest.approx(20.0, abs=1.0)
    assert (used.counted_seconds, used.startup_seconds) == (5.0, 15.0)
