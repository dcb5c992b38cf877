"""Curves for plots, read from files like those of a run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from z2all_ds.base.errors import DataError
from z2all_ds.track import plot_data
from z2all_ds.track.plot_data import MOST_POINTS, RunCurves, read_run


def written(folder: Path, records: list[dict[str, Any]], events: list[dict[str, Any]] | None = None) -> Path:
    folder.mkdir()
    for name, lines in (("metrics", records), ("events", events or [])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def read(folder: Path, kind: str = "loss", x: str = "step", smooth: float = 0.0) -> RunCurves:
    return read_run(folder, "run", [kind], x, smooth)


def test_only_the_requested_curves_are_kept(tmp_path: Path) -> None:
    records = [{"step": i, "loss": 1.0 * i, "loss_of_a": 2.0, "lr": 0.1, "mfu": None} for i in range(1, 4)]
    run = read(written(tmp_path / "run", records))
    assert run.keys_of("loss") == ["loss", "loss_of_a"]
    assert run.curves["loss"].y.tolist() == [1.0, 2.0, 3.0]
    assert run.kinds_there == ["loss", "lr"]
    assert "lr" not in run.curves


def test_a_long_run_is_reduced_to_few_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(plot_data, "PROGRESS_FROM_BYTES", 1)
    records = [{"step": i, "loss": 99.0 if i == 7000 else 1.0} for i in range(1, 20_001)]
    run = read(written(tmp_path / "run", records), smooth=0.5)
    for curve in (run.curves["loss"], run.smoothed["loss"]):
        assert len(curve.x) == 20_000 / run.records_per_point <= MOST_POINTS
    assert run.curves["loss"].x[:2].tolist() == [8.5, 24.5]  # means of 16 steps
    assert max(run.curves["loss"].y) == 1 + 98 / 16
    assert max(run.curves["loss"].high) == 99.0  # a spike of one step stays visible
    assert capfd.readouterr().err.startswith("reading run: ")


def test_smoothing_begins_at_the_first_value(tmp_path: Path) -> None:
    run = read(written(tmp_path / "run", [{"step": i, "loss": v} for i, v in enumerate((8.0, 4.0, 4.0))]), smooth=0.5)
    # Weights: 1; 1/3, 2/3; 1/7, 2/7, 4/7.
    assert run.smoothed["loss"].y == pytest.approx([8.0, 16 / 3, 32 / 7])


def test_events_are_marked_where_they_happened(tmp_path: Path) -> None:
    records = [{"step": i, "loss": 1.0, "tokens_seen": 10 * i, "time_unix": 100.0 + i} for i in range(1, 101)]
    events = [
        {"event": "started", "step": 0, "time_unix": 90.0},
        {"event": "checkpoint", "step": 50, "time_unix": 150.5},
        {"event": "started", "step": 50, "time_unix": 150.7},
        {"event": "spike", "step": 60, "time_unix": 160.0},
        {"event": "rolled_back", "step": 50, "time_unix": 160.1},
        {"event": "stage", "step": 0, "time_unix": 101.0},
        {"event": "stage", "step": 70, "time_unix": 170.0},
    ]
    folder = written(tmp_path / "run", records, events)
    expected = {"checkpoint": 50, "restart": 50, "spike": 60, "rollback": 50, "stage": 70}
    assert read(folder).marks == {kind: [step] for kind, step in expected.items()}
    assert read(folder, x="tokens").marks == {kind: [10 * step] for kind, step in expected.items()}
    assert read(folder, x="time").marks["checkpoint"] == pytest.approx([49.5])


def test_lines_that_are_not_events_are_skipped(tmp_path: Path) -> None:
    records = [{"step": i, "loss": 1.0, "time_unix": 100.0 + i} for i in range(1, 11)]
    folder = written(tmp_path / "run", records)
    facts = {"mixture": [{"first_step": 0, "shares": {"a": 1.0}}], "probes": [{"name": "p", "kind": "completion"}]}
    start = {"event": "started", "step": 0, **facts}
    odd = ['{"event": "checkp', "[1]", "{}", '{"event": "spike"}']
    checkpoints = [f'{{"event": "checkpoint", "step": {step}}}' for step in (5, 7)]
    # The last line is incomplete: it has no line end.
    (folder / "events.jsonl").write_text("\n".join([json.dumps(start), *odd, *checkpoints]))
    run = read(folder)
    assert run.marks == {"checkpoint": [5]}
    assert [stage.shares for stage in run.requested] == [{"a": 1.0}] and list(run.probe_labels) == ["probe_p"]
    assert read(folder, x="time").marks == {}


def test_many_events_are_reduced_to_few_marks(tmp_path: Path) -> None:
    events = [{"event": "checkpoint", "step": i, "time_unix": float(i)} for i in range(1, 5001)]
    run = read(written(tmp_path / "run", [{"step": i, "loss": 1.0} for i in range(1, 5001)], events))
    assert 200 <= len(run.marks["checkpoint"]) <= 302


def test_the_mixture_is_the_share_of_tokens_since_the_stage_began(tmp_path: Path) -> None:
    tokens = [(10, 30), (10, None), (None, 40), (5, 5)]
    records = [
        {"step": i, **{f"tokens_of_{name}": n for name, n in zip("ab", pair, strict=True) if n is not None}}
        for i, pair in enumerate(tokens, 1)
    ]
    mixture = [{"name": "x", "first_step": 0, "shares": {"a": 1.0}}, {"name": "y", "first_step": 3, "shares": {"b": 1}}]
    folder = written(tmp_path / "run", records, [{"event": "started", "step": 0, "time_unix": 0.0, "mixture": mixture}])
    run = read(folder, "mixture")
    assert run.curves["tokens_of_a"].y == pytest.approx([10 / 40, 20 / 50, 20 / 90, 0.5])
    assert run.curves["tokens_of_b"].y == pytest.approx([30 / 40, 30 / 50, 70 / 90, 0.5])
    assert [stage.first_step for stage in run.requested] == [0, 3]


def test_a_line_without_an_end_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", [{"step": 1, "loss": 1.0}])
    os.truncate(folder / "metrics.jsonl", 10**11)
    with pytest.raises(DataError, match=r"metrics\.jsonl: a record is longer than 4,194,304 bytes"):
        read(folder)


def test_a_line_that_is_not_json_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", [{"step": 1, "loss": 1.0}])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl: a record is not JSON"):
        read(folder)
