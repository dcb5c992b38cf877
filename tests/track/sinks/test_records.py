"""Records that a sink does not have yet: each is returned once, even after a truncation or a restart of the reader."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.sinks.feed import unconfirmed
from z2all_ds.track.sinks.records import Mark, Progress, RecordFollower
from z2all_ds.track.sinks.session import in_order_of_time
from z2all_ds.track.sinks.settings import SinkSettings


def line(step: int, moment: float) -> bytes:
    return json.dumps({"step": step, "time_unix": moment}).encode() + b"\n"


@settings(max_examples=80, deadline=None)
@given(acts=st.lists(st.tuples(st.sampled_from(["add", "cut", "look", "restart"]), st.integers(0, 9)), max_size=30))
def test_each_record_is_returned_once(acts: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("records") / "metrics.jsonl"
    follower, moment = RecordFollower(path, Mark()), 0.0
    history: list[Any] = []
    seen: list[Any] = []
    for act, number in [*acts, ("look", 0)]:
        if act == "cut":
            history = history[:number]
        for _ in range(number if act == "add" else 0):
            moment += 1
            history.append((len(history) + 1, moment))
        path.write_bytes(b"".join(line(*one) for one in history))
        if act == "restart":
            follower = RecordFollower(path, follower.mark)
        while act == "look" and (found := follower.read()):
            seen += [(record["step"], record["time_unix"]) for record in found]
    assert len(set(seen)) == len(seen)
    assert set(history) <= set(seen)


def test_no_record_is_lost_when_the_clock_is_set_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1, 100.0) + line(2, 101.0))
    follower = RecordFollower(path, Mark())
    follower.read()
    with path.open("ab") as file:
        file.write(line(3, 50.0))
    again = RecordFollower(path, follower.mark)
    for one in (follower, again):
        assert [record["step"] for record in one.read()] == [3]


def test_unconfirmed_records_are_counted(tmp_path: Path) -> None:
    folder, settings = RunFolder(tmp_path), SinkSettings(tensorboard=True)
    size = len(line(1, 1.0))
    marks = {Mark(): 7, Mark(size, 1, 1.0): 6, Mark(size, 1, 0.5): 7, Mark(9 * size, 5, 5.5): 2}
    for mark, left in marks.items():  # the last two match no record: all records with a later time are counted
        Progress(folder.sinks / "tensorboard.json", {}, {}).save_marks("files", metrics=mark)
        folder.metrics.unlink(missing_ok=True)
        assert unconfirmed(folder, "tensorboard", settings) == 0
        folder.metrics.write_bytes(b"".join(line(step, float(step)) for step in range(1, 8)))
        assert unconfirmed(folder, "tensorboard", settings) == left


def test_events_come_before_the_record_that_follows_them() -> None:
    records = [{"step": step, "time_unix": float(step)} for step in (1, 2, 3)]
    events = [{"event": kind, "time_unix": moment} for kind, moment in (("a", 0.5), ("b", 2.0), ("c", 2.5), ("d", 9.0))]
    a, b, c, d = events
    one, two, three = records
    assert in_order_of_time(records, events, has_more=True) == ([a, one, b, two, c, three], [d])
    assert in_order_of_time(records, events, has_more=False) == ([a, one, b, two, c, three, d], [])
    assert in_order_of_time([], [d], has_more=True) == ([], [d])


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"facts": {}, "marks": 3}', b'{"facts": {}}', b"\xff"])
def test_unreadable_progress_counts_as_empty(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "sinks" / "wandb.json"
    if content is not None:
        path.parent.mkdir()
        path.write_bytes(content)
    progress = Progress.load(path)
    assert progress.mark("online", "metrics") == Mark()
    progress.facts["id"] = "一"
    progress.marks["online"] = {"metrics": Mark(5, 2, 1.5)}
    progress.save()
    assert Progress.load(path) == progress
