"""Probes of a run: definitions, last values and verdicts, and evaluations that appear later."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from z2all_ds.evaluate.probe_report import ModelAnswers, ProbeAnswer, file_content
from z2all_ds.evaluate.probes import load_probes
from z2all_ds.track.board.probes import probes_of
from z2all_ds.track.board.run import WatchedRun
from z2all_ds.track.files import Files

START = 1_790_000_000.0
DEFINED = [
    {"name": "首都", "kind": "completion", "at_least": 0.1, "at_most": None, "from_step": 0},
    {"name": "news", "kind": "sentence", "at_least": None, "at_most": 60.0, "from_step": 30},
    {"name": "order", "kind": "compare", "at_least": None, "at_most": None, "from_step": 0},
]


def write(path: Path, *records: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def metrics(*probes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one record per ten steps, each with the given probe values."""
    return [
        {"step": 10 * n, "tokens_seen": 100 * n, "loss": 1.0, **found, "time_unix": START + 5 * n}
        for n, found in enumerate(probes, start=1)
    ]


def started(step: int, moment: float, **more: Any) -> dict[str, Any]:
    return {"time_unix": START + moment, "event": "started", "step": step, **more}


def look(run: WatchedRun) -> dict[str, dict[str, Any]]:
    while run.update():
        pass
    return {probe["name"]: probe for probe in run.probes()}


def run_in(folder: Path) -> WatchedRun:
    return WatchedRun(0, Files(), str(folder), str(folder))


def verdicts(found: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    return {name: (probe["kind"], probe["step"], probe["value"], probe["passed"]) for name, probe in found.items()}


def test_probes_of_the_run_have_values_and_verdicts(tmp_path: Path) -> None:
    first = {"probe_首都": 0.5, "probe_news": 99.0, "probe_order": -1.0, "probe_old": 7.0}
    second = {"probe_首都": 0.05, "probe_news": 90.0, "probe_order": 0.25}
    write(tmp_path / "metrics.jsonl", *metrics(first, second, {}))
    write(tmp_path / "events.jsonl", started(0, 0, probes=DEFINED), started(20, 12, probes=[]))
    run = run_in(tmp_path)
    found = look(run)
    assert verdicts(found) == {
        "首都": ("completion", 20, 0.05, False),
        "news": ("sentence", 20, 90.0, None),  # not judged before step 30
        "order": ("compare", 20, 0.25, None),  # no expectation is defined
        "old": (None, 10, 7.0, None),
    }
    assert found["首都"]["at_least"] == 0.1 and found["news"]["from_step"] == 30
    assert found["首都"]["points"] == {"step": [], "tokens": [], "seconds": [], "value": []}
    write(tmp_path / "metrics.jsonl", *metrics(first, second, {}, {"probe_首都": 0.1, "probe_news": 61.0}))
    assert verdicts(look(run))["首都"] == ("completion", 40, 0.1, True)
    assert verdicts(look(run))["news"] == ("sentence", 40, 61.0, False)
    write(tmp_path / "metrics.jsonl", *metrics(first))
    assert verdicts(look(run))["首都"] == ("completion", 10, 0.5, True)


def test_evaluations_that_appear_later_are_read(tmp_path: Path) -> None:
    """The file has the content that `z2all evaluate probes` writes for the shipped probes."""
    probes = load_probes("zh_en")
    write(tmp_path / "metrics.jsonl", *metrics({}, {}, {}, {}))
    write(tmp_path / "events.jsonl", started(0, 0))
    run = run_in(tmp_path)
    assert look(run) == {} and run.summary("x")["evaluations"] == 0
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations" / "harness.json").write_text("{}")
    assert look(run) == {} and run.summary("x")["evaluations"] == 0
    of_steps = [
        ModelAnswers(f"step {step}", step, {probe.name: ProbeAnswer(0.01 * step, step > 20, {}) for probe in probes})
        for step in (15, 25, 99)
    ]
    write_evaluation(tmp_path, "zh_en", file_content("zh_en", probes, of_steps))
    found = look(run)
    assert len(found) == len(probes) and run.summary("x")["evaluations"] == 1
    capital = found["zh_capital"]
    assert (capital["kind"], capital["step"], capital["value"], capital["passed"]) == ("completion", 99, 0.99, True)
    assert capital["points"]["step"] == [15, 25, 99]
    assert capital["points"]["tokens"] == [150, 250, None]  # step 99 is not in the metrics
    assert capital["points"]["seconds"] == [7.5, 12.5, None]
    assert capital["points"]["value"] == pytest.approx([0.15, 0.25, 0.99])
    write_evaluation(tmp_path, "mine", {"probes": [DEFINED[0]], "rows": [{"step": 20, "values": {"首都": 0.3}}, "odd"]})
    assert look(run)["首都"]["value"] == 0.3
    write_evaluation(tmp_path, "mine", {"probes": 3, "rows": [{"step": None, "values": {"首都": 0.3}}]})
    assert "首都" not in look(run)
    os.remove(tmp_path / "evaluations" / "probes_zh_en.json")
    assert look(run) == {}
    version = run.summary("x")["evaluations"]
    look(run)
    assert run.summary("x")["evaluations"] == version


def write_evaluation(folder: Path, name: str, content: dict[str, Any]) -> None:
    file = folder / "evaluations" / f"probes_{name}.json"
    file.with_suffix(".tmp").write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    file.with_suffix(".tmp").rename(file)


def nothing_at(steps: Any) -> list[float | None]:
    return [None for _ in steps]


def test_the_newest_answer_counts() -> None:
    # The value is high enough, but the answer did not have the required form.
    rows = [{"step": 20, "values": {"首都": 0.9}, "passed": {"首都": False}}]
    evaluation = {"probes": DEFINED, "rows": rows}

    def shown(trained: dict[str, tuple[float, float]]) -> tuple[Any, ...]:
        probe = probes_of(DEFINED, [evaluation], trained, nothing_at, nothing_at)[0]
        return probe["step"], probe["value"], probe["passed"], len(probe["points"]["step"])

    assert shown({}) == (20, 0.9, False, 1)
    assert shown({"首都": (10, 0.8)}) == (20, 0.9, False, 0)
    assert shown({"首都": (20, 0.8)}) == (20, 0.8, False, 0)
    assert shown({"首都": (30, 0.8)}) == (30, 0.8, True, 0)


def test_an_unchanged_folder_is_not_listed_again(tmp_path: Path) -> None:
    class CountingFiles(Files):
        lists = 0

        def file_names(self, path: str) -> list[str]:
            self.lists += 1
            return super().file_names(path)

    files = CountingFiles()
    write(tmp_path / "metrics.jsonl", *metrics({}))
    evaluations = tmp_path / "evaluations"
    evaluations.mkdir()
    os.utime(evaluations, (START, START))
    run = WatchedRun(0, files, str(tmp_path), str(tmp_path))
    for _ in range(3):
        look(run)
    assert files.lists == 1
