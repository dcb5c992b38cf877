"""Detection of slow ranks and nodes."""

import json
from pathlib import Path
from typing import Any

import pytest

from z2all_ds.track.board import health as health_module
from z2all_ds.track.board.health import HealthLog
from z2all_ds.track.files import Files


def record(step: int, work: list[float], wait: list[float] | None = None) -> dict[str, Any]:
    memory = [1000] * len(work)
    waits = wait or [0.0] * len(work)
    return {
        "step": step,
        "time_unix": 10.0 * step,
        "work_seconds": work,
        "data_wait_seconds": waits,
        "memory_bytes": memory,
    }


def log_of(path: Path, records: list[dict[str, Any]]) -> HealthLog:
    path.write_text("".join(json.dumps(one) + "\n" for one in records) + '{"torn')
    log = HealthLog(Files(), str(path))
    while log.update(Files().stats([str(path)])[1][0]):
        pass
    return log


def test_ranks_and_nodes_that_are_slow_or_wait_for_data_are_found(tmp_path: Path) -> None:
    usual = record(1, [1.0, 1.0, 1.3, 1.0], [0.0, 0.5, 0.0, 0.0])
    once = record(5, [9.0, 1.0, 1.3, 1.0], [0.0, 0.5, 0.0, 0.0])  # a single slow step does not make a rank slow
    log = log_of(tmp_path / "health.jsonl", [record(0, [5.0, 5.0])] + [usual] * 4 + [once])
    shown = log.shown(["a", "a", "b", "b"], 60.0)
    assert [rank["verdict"] for rank in shown["ranks"]] == ["ok", "waits for data", "slow", "ok"]
    assert [(node["host"], node["ranks"], node["verdict"]) for node in shown["nodes"]] == [
        ("a", [0, 1], "waits for data"),
        ("b", [2, 3], "slow"),
    ]
    assert (shown["step"], shown["age_seconds"]) == (5, 10.0)
    assert shown["ranks"][0]["work_seconds"] == 1.0  # the median, which the verdict is based on
    assert shown["nodes"][1]["work_seconds"] == pytest.approx(1.15)


def test_milliseconds_are_noise(tmp_path: Path) -> None:
    """Steps of a tiny model: 7 ms of waiting are a large share of them, and 2 ms a large difference."""
    tiny = record(1, [0.004, 0.006, 0.004], [0.007, 0.0, 0.0])
    shown = log_of(tmp_path / "health.jsonl", [tiny] * 5).shown([], 0.0)
    assert [rank["verdict"] for rank in shown["ranks"]] == ["ok"] * 3
    longer = record(1, [0.03, 0.045, 0.03], [0.012, 0.0, 0.0])
    shown = log_of(tmp_path / "health.jsonl", [longer] * 5).shown([], 0.0)
    assert [rank["verdict"] for rank in shown["ranks"]] == ["waits for data", "slow", "ok"]


def test_a_wait_of_the_past_is_shown_with_its_verdict(tmp_path: Path) -> None:
    waits = [record(step, [1.0], [wait]) for step, wait in enumerate([2.0, 2.0, 2.0, 0.007, 0.007])]
    (rank,) = log_of(tmp_path / "health.jsonl", waits).shown([], 0.0)["ranks"]
    assert (rank["verdict"], rank["data_wait_seconds"]) == ("waits for data", 2.0)


def test_without_a_health_file_no_ranks_are_shown(tmp_path: Path) -> None:
    shown = HealthLog(Files(), str(tmp_path / "health.jsonl")).shown([], 0.0)
    assert (shown["step"], shown["age_seconds"], shown["ranks"], shown["nodes"]) == (None, None, [], [])


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "FILE_TAIL_BYTES", 1000)
    path = tmp_path / "health.jsonl"
    log = log_of(path, [record(step, [1.0, None]) for step in range(500)])  # type: ignore[list-item]
    assert log.count < 20
    assert log.records[-1]["step"] == 499
    assert log.shown([], 0.0)["ranks"][1]["verdict"] == "ok"
    path.write_text(json.dumps(record(1, [1.0])) + "\n")
    log.update(Files().stats([str(path)])[1][0])
    assert [one["step"] for one in log.records] == [1]
