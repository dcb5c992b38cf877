"""State of a run: running, silent or ended, its ETA and goodput; folders that appear later."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from z2all_ds.track.board.run import WatchedRun
from z2all_ds.track.board.watch import Watch
from z2all_ds.track.files import Files
from z2all_ds.track.goodput import goodput
from z2all_ds.track.writer import read_records

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def write(path: Path, *records: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def run_in(folder: Path) -> WatchedRun:
    run = WatchedRun(0, Files(), str(folder), str(folder))
    while run.update():
        pass
    return run


def steps(count: int, last_unix: float, seconds: float = 2.0) -> list[dict[str, Any]]:
    return [
        {
            "step": n,
            "tokens_seen": 8 * n,
            "loss": 1.0,
            "step_seconds": seconds,
            "time_unix": last_unix - (count - n) * seconds,
        }
        for n in range(1, count + 1)
    ]


def age(folder: Path, seconds: float) -> None:
    import os

    for file in folder.iterdir():
        os.utime(file, (time.time() - seconds,) * 2)


def test_a_missing_folder_is_an_empty_run(tmp_path: Path) -> None:
    summary = run_in(tmp_path / "later").summary("later")
    assert (summary["status"], summary["step"], summary["records"], summary["read_share"]) == ("empty", None, 0, 1.0)
    assert summary["note"] == "no such folder"
    assert run_in(tmp_path).summary("now")["note"] == "nothing written yet"


def test_a_failed_run_is_shown_with_its_reason_until_it_is_started_again(tmp_path: Path) -> None:
    started = {"time_unix": time.time(), "event": "started", "step": 0}
    failed = {"time_unix": time.time(), "event": "failed", "step": 3, "reason": "TrainingError: loss is not finite"}
    write(tmp_path / "metrics.jsonl", *steps(3, time.time()))
    write(tmp_path / "events.jsonl", started, failed)
    summary = run_in(tmp_path).summary("x")
    assert (summary["status"], summary["eta_seconds"]) == ("failed", None)
    assert "TrainingError: loss is not finite" in summary["note"]
    write(tmp_path / "events.jsonl", started, failed, started)
    assert run_in(tmp_path).summary("x")["status"] == "running"


def test_a_failed_attempt_does_not_change_the_figures_of_a_run(tmp_path: Path) -> None:
    """Not those of a run without a recorded goodput, either."""
    started = {"time_unix": 990.0, "event": "started", "step": 0}
    first = {"time_unix": 996.0, "event": "first_step", "step": 1, "seconds": 6.0, "first_step_seconds": 2.0}
    failed = {"time_unix": 1000.0, "event": "failed", "step": 3, "reason": "TrainingError: loss is not finite"}
    write(tmp_path / "metrics.jsonl", *steps(3, 1000.0))
    write(tmp_path / "events.jsonl", started, first, failed)
    before = run_in(tmp_path).summary("x")
    assert (before["elapsed_seconds"], before["goodput"]) == (10.0, 0.6)
    again = {**failed, "time_unix": 9000.0, "reason": "MachineError: no memory"}
    write(tmp_path / "events.jsonl", started, first, failed, again)
    after = run_in(tmp_path).summary("x")
    assert (after["note"], after["last_record_unix"]) == ("MachineError: no memory", 9000.0)
    assert [after[key] for key in ("elapsed_seconds", "goodput")] == [10.0, 0.6]


class WatchedFiles(Files):
    """Files that call `look` whenever a file with that name is read."""

    def __init__(self, name: str, look: Callable[[], None]) -> None:
        self._name, self._look = name, look

    def read(self, path: str, offset: int, length: int) -> bytes:
        if path.endswith(self._name):
            self._look()
        return super().read(path, offset, length)


def test_settings_are_read_before_the_events(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", {"time_unix": 1.0, "event": "started", "step": 0})
    (tmp_path / "run.yaml").write_text("train: {steps: 77}\n")
    found: list[dict[str, Any]] = []
    files = WatchedFiles("events.jsonl", lambda: found.append(run.settings.flat))
    run = WatchedRun(0, files, str(tmp_path), str(tmp_path))
    run.update()
    assert found[0] == {"train.steps": 77}


def test_a_sample_is_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("z2all_ds.track.board.curves.SAMPLE_FROM_BYTES", 1)
    write(tmp_path / "metrics.jsonl", *({**record, "tokens_of_a": 8} for record in steps(10, 1000.0)))
    seen: list[tuple[Any, ...]] = []

    def look() -> None:
        if run.curves.is_sample:
            (domain,) = run.mixture()["domains"]
            seen.append((run.summary("x")["is_sample"], domain["realised"], domain["tokens"]))

    run = WatchedRun(0, WatchedFiles("metrics.jsonl", look), str(tmp_path), str(tmp_path))
    while run.update():
        pass
    assert seen and set(seen) == {(True, 1.0, None)}
    assert run.summary("x")["is_sample"] is False
    assert run.mixture()["domains"][0]["tokens"] == 80


def test_a_running_run_has_an_eta_and_becomes_silent(tmp_path: Path) -> None:
    now = time.time()
    write(tmp_path / "metrics.jsonl", *steps(10, now))
    write(tmp_path / "events.jsonl", {"time_unix": now - 30, "event": "started", "step": 0, "steps": 110})
    run = run_in(tmp_path)
    summary = run.summary("x")
    assert (summary["status"], summary["step"], summary["steps"]) == ("running", 10, 110)
    assert summary["eta_seconds"] == pytest.approx(200.0, rel=1e-3)
    assert 30 <= summary["elapsed_seconds"] < 40
    write(tmp_path / "metrics.jsonl", *steps(10, now - 3000))
    write(tmp_path / "events.jsonl", {"time_unix": now - 3030, "event": "started", "step": 0, "steps": 110})
    age(tmp_path, 3000)
    silent = run_in(tmp_path).summary("x")
    assert (silent["status"], silent["eta_seconds"]) == ("silent", None)
    assert "nothing written for 50m" in silent["note"]
    # With such long steps, this silence is normal.
    write(tmp_path / "metrics.jsonl", *steps(10, now - 3000, seconds=400.0))
    age(tmp_path, 3000)
    assert run_in(tmp_path).summary("x")["status"] == "running"


def test_eta_counts_from_the_last_start(tmp_path: Path) -> None:
    now = time.time()
    records = steps(5, now - 5000) + [{**record, "step": record["step"] + 5} for record in steps(5, now)]
    write(tmp_path / "metrics.jsonl", *records)
    write(
        tmp_path / "events.jsonl",
        {"time_unix": now - 5100, "event": "started", "step": 0, "steps": 20},
        {"time_unix": now - 20, "event": "started", "step": 5, "steps": 20},
    )
    assert run_in(tmp_path).summary("x")["eta_seconds"] == pytest.approx(20.0, rel=1e-2)


def test_no_point_is_placed_in_a_pause_of_the_run(tmp_path: Path) -> None:
    """Steps 4 to 6 are merged into one point; step 4 is before the pause, steps 5 and 6 are after it."""
    records = steps(4, 1000.0) + [{**record, "step": record["step"] + 4} for record in steps(4, 9000.0)]
    write(tmp_path / "metrics.jsonl", *records)
    starts = [{"time_unix": moment, "event": "started", "step": 0} for moment in (990.0, 8990.0)]
    write(tmp_path / "events.jsonl", *starts)
    run = run_in(tmp_path)
    assert run.points(["loss"], "time", None, None, 3)["x"].tolist() == [996 - 990, 1000 - 990, 8999 - 990]
    assert run.points(["loss"], "step", None, None, 3)["x"].tolist() == [2, 5, 7.5]


def test_the_total_steps_of_an_older_run_come_from_its_settings(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train:\n  steps: 77\n")
    assert run_in(tmp_path).summary("x")["steps"] == 77


@pytest.mark.parametrize("name", ["training", "stopped_training"])
def test_the_summary_of_a_real_run(name: str, tmp_path: Path) -> None:
    for kind in ("metrics", "events"):
        (tmp_path / f"{kind}.jsonl").write_bytes((RESULTS / f"2026-11-16_h200_{name}_{kind}.jsonl").read_bytes())
    run = run_in(tmp_path)
    summary = run.summary("x")
    events, metrics = (list(read_records(tmp_path / f"{kind}.jsonl")) for kind in ("events", "metrics"))
    assert (summary["status"], summary["step"], summary["records"]) == ("done", metrics[-1]["step"], len(metrics))
    assert summary["domains"] == ["code", "en", "zh"]
    assert summary["goodput"] == events[-1]["goodput"]
    without_its_end = tmp_path / "events.jsonl"
    without_its_end.write_text("".join(json.dumps(event) + "\n" for event in events[:-1]))
    age(tmp_path, 9000)
    silent = run_in(tmp_path).summary("x")
    assert silent["goodput"] == pytest.approx(goodput(events[:-1], metrics).share, abs=1e-6)
    tokens = {event["event"]: event["tokens_seen"] for event in run.shown_events()}
    assert tokens["checkpoint"] == metrics[-1]["tokens_seen"]
    points = run.points(["loss"], "time", 100.0, 200.0, 5000)
    start = events[0]["time_unix"]
    assert points["x"].tolist() == pytest.approx(
        [r["time_unix"] - start for r in metrics if 100.0 <= r["time_unix"] - start <= 200.0]
    )


def test_unreadable_lines_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", {"time_unix": 1.0, "event": "done", "step": 1})
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time_unix": 1.0}\nodd\n\n')
    assert run_in(tmp_path).summary("x")["note"] == "2 unreadable lines skipped"


def test_runs_that_appear_later_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("z2all_ds.track.board.watch.SEARCH_EVERY_SECONDS", 0.05)
    monkeypatch.setattr("z2all_ds.track.board.run.UPDATE_EVERY_SECONDS", 0.05)
    runs = tmp_path / "runs"
    runs.mkdir()
    (tmp_path / "other" / "first").mkdir(parents=True)
    watch = Watch([f"{runs}/", str(tmp_path / "other" / "first")])
    watch.start()
    try:
        assert [run.location for run in watch.shown_runs()] == [str(runs), str(tmp_path / "other" / "first")]
        write(runs / "first" / "metrics.jsonl", *steps(3, time.time()))
        until(lambda: [run.id for run in watch.shown_runs()] == ["1", "2"])
        assert watch.names() | {"0": ""} == {"0": "", "1": str(tmp_path / "other" / "first"), "2": f"{runs}/first"}
        write(runs / "second" / "metrics.jsonl", *steps(3, time.time()))
        until(lambda: len(watch.shown_runs()) == 3)
        assert watch.names()["3"] == "second"
        until(lambda: watch.runs()[3].curves.records == 3)
    finally:
        watch.stop()


def test_a_read_error_is_reported(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    watch = Watch([str(tmp_path)])
    watch.start()
    try:
        until(lambda: "directory" in watch.runs()[0].summary("x")["note"])
        assert watch.runs()[0].summary("x")["records"] == 0
    finally:
        watch.stop()
