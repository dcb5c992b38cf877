"""Events of a run: marks for the page, and the outcome of the run."""

import json
from pathlib import Path
from typing import Any

import pytest

from z2all_ds.track.board.events import MARKS_KEPT, EventLog
from z2all_ds.track.fields import event_title
from z2all_ds.track.files import Files


def write(path: Path, *events: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def look(log: EventLog, path: Path) -> None:
    while log.update(Files().stats([str(path)])[1][0]):
        pass


def test_marks_restarts_and_the_outcome_are_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(Files(), str(path))
    look(log, path)
    assert (log.count, log.outcome) == (0, None)
    start: dict[str, Any] = {"time_unix": 100.0, "event": "started", "step": 0, "world_size": 2, "steps": 9}
    first = {"time_unix": 110.0, "event": "first_step", "step": 1, "seconds": 15.0, "first_step_seconds": 1.0}
    saved = {"time_unix": 112.0, "event": "saved", "step": 3, "seconds": 1.0}
    stop = {"time_unix": 120.0, "event": "requeue", "step": 5, "goodput": 0.5}
    write(path, start, first, saved, stop)
    look(log, path)
    assert (log.outcome, log.goodput, log.first_unix, log.process_unix) == ("requeue", 0.5, 100.0, 95.0)
    again = {**start, "time_unix": 200.0, "step": 5}
    write(path, start, first, saved, stop, again, {**first, "time_unix": 201.0, "seconds": 150.0})
    look(log, path)
    assert (log.outcome, log.goodput, log.process_unix, log.count) == ("started", None, 95.0, 6)
    done = {"time_unix": 210.0, "event": "done", "step": 9, "goodput": 0.25}
    idle = [{**start, "time_unix": 9000.0, "step": 9}, {"time_unix": 9001.0, "event": "done", "step": 9}]
    other = EventLog(Files(), str(tmp_path / "finished.jsonl"))
    write(tmp_path / "finished.jsonl", start, first, done, *idle)
    look(other, tmp_path / "finished.jsonl")
    assert (other.outcome, other.goodput) == ("done", 0.25)  # a process without a step does not change it
    shown = log.shown()
    assert [(mark["number"], mark["event"], mark["seconds"]) for mark in shown] == [
        (0, "started", 0.0),
        (3, "requeue", 20.0),
        (4, "restart", 100.0),
    ]
    assert shown[2]["title"] == "restarted at step 5 on 2 ranks"
    assert shown[2]["details"] == again


def test_a_run_begins_with_its_first_start_and_ends_before_a_failed_attempt_to_continue(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(Files(), str(path))
    failed = [{"time_unix": moment, "event": "failed", "step": 0, "reason": "no memory"} for moment in (10.0, 20.0)]
    write(path, *failed)
    look(log, path)
    assert (log.outcome, log.reason, log.first_unix, log.end_unix) == ("failed", "no memory", 10.0, 10.0)
    start = {"time_unix": 100.0, "event": "started", "step": 0}
    first = {"time_unix": 110.0, "event": "first_step", "step": 1, "seconds": 15.0, "first_step_seconds": 1.0}
    stop = {"time_unix": 120.0, "event": "stopped", "step": 5, "goodput": 0.5}
    write(path, *failed, start, first, stop)
    look(log, path)
    assert (log.outcome, log.first_unix, log.process_unix, log.end_unix) == ("stopped", 100.0, 95.0, 120.0)
    assert [(mark["event"], mark["seconds"]) for mark in log.shown()] == [
        ("failed", 0.0),
        ("failed", 0.0),
        ("started", 0.0),
        ("stopped", 20.0),
    ]
    write(path, *failed, start, first, stop, {**failed[0], "time_unix": 9000.0, "step": 5})
    look(log, path)
    assert (log.outcome, log.reason, log.goodput) == ("failed", "no memory", 0.5)
    assert (log.last_unix, log.end_unix) == (9000.0, 120.0)


def test_invalid_lines_are_counted_and_a_replaced_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(Files(), str(path))
    path.write_text('no record\n{"event": 7}\n{"event": "done"}\n{"event": "half')
    look(log, path)
    assert (log.count, log.unparsable, log.outcome) == (1, 2, "done")
    assert log.shown()[0]["step"] is None and log.shown()[0]["seconds"] is None
    write(path, *({"time_unix": float(number), "event": "checkpoint", "step": number} for number in range(2500)))
    look(log, path)
    assert (log.count, log.unparsable, log.outcome) == (2500, 0, None)
    assert len(log.shown()) == MARKS_KEPT
    assert log.shown()[-1]["step"] == 2499


@pytest.mark.parametrize(
    ("kind", "record", "title"),
    [
        ("started", {"world_size": 1}, "started on 1 rank"),
        ("started", {}, "started"),
        ("stage", {"name": "long"}, "stage long"),
        ("checkpoint", {"path": "step_00000060"}, "checkpoint step_00000060"),
        ("spike", {"policy": "skip", "outliers": ["grad_norm", "loss"]}, "spike of grad_norm, loss: skip"),
        ("spike", {}, "spike"),
        ("rolled_back", {"from_step": 40, "step": 30}, "rolled back from step 40 to 30"),
        ("fault", {"fault": "hang", "rank": 0}, "fault: hang on rank 0"),
        ("fault", {}, "fault: unknown"),
        ("recovered", {"seconds": 65}, "recovered in 1m05s"),
        ("recovered", {}, "recovered"),
        ("stopped", {}, "stopped"),
        ("requeue", {}, "stopped on request"),
        ("done", {"goodput": 0.9094}, "done, goodput 90.9%"),
        ("done", {}, "done"),
    ],
)
def test_titles_of_events(kind: str, record: dict[str, Any], title: str) -> None:
    assert event_title({"event": kind, **record}) == title
