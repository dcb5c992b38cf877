"""metrics.jsonl and events.jsonl: records are written and read back, also after a crash has cut off a line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.processes import ended
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.fault_records import LAUNCH_VARIABLE, name_launch
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.writer import (
    NO_END,
    RunWriter,
    drop_metrics_after,
    last_outcome,
    last_record,
    read_records,
    record_failed_launch,
    record_failure,
)

WRITE_AND_HANG = """
import sys, time
from pathlib import Path
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.writer import RunWriter

writer = RunWriter(RunFolder(Path(sys.argv[1])))
writer.event("started", step=0)
for step in range(1, 4):
    writer.metric({"step": step, "loss": 1 / step})
print("written", flush=True)
time.sleep(60)
"""


def records(*steps: int) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 7.5 / step, "loss_of_中文": 0.1 + step, "grad_norm": None} for step in steps]


def write(folder: RunFolder, *steps: int) -> list[dict[str, Any]]:
    writer = RunWriter(folder)
    for record in records(*steps):
        writer.metric(record)
    writer.close()
    return records(*steps)


def test_records_come_back_exactly_and_in_order(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = write(folder, 1, 2)
    assert list(read_records(folder.metrics)) == first
    second = write(folder, 3)
    assert list(read_records(folder.metrics)) == first + second
    assert "loss_of_中文" in folder.metrics.read_text(encoding="utf-8")
    assert len(folder.metrics.read_bytes().splitlines()) == 3


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_file_that_is_a_link_is_not_changed(name: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text('{"step": 1}\n{"step": 9}\na line of another file')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(target)
    with pytest.raises(ConfigError, match=f"{name}: is a link"):
        RunWriter(RunFolder(tmp_path / "run"))
    with pytest.raises(ConfigError, match=f"{name}: is a link"):
        drop_metrics_after(tmp_path / "run" / name, 1)
    assert target.read_text().endswith("a line of another file")


def test_events_carry_their_time_and_details(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    before = time.time()
    writer = RunWriter(folder)
    writer.event("checkpoint", step=50, path="step_00000050")
    writer.close()
    (event,) = read_records(folder.events)
    assert before - 0.001 <= event.pop("time_unix") <= time.time() + 0.001
    assert event == {"event": "checkpoint", "step": 50, "path": "step_00000050"}


def test_a_killed_run_loses_no_record(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    command = [sys.executable, "-c", WRITE_AND_HANG, str(tmp_path)]
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert list(read_records(folder.metrics)) == [{"step": step, "loss": 1 / step} for step in (1, 2, 3)]
    assert last_outcome(folder) == "started"


WRITE_WITH_A_LIMIT = """
import json, resource, sys
from pathlib import Path
from z2all_ds.base.fault_records import LAUNCH_VARIABLE, name_launch
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.writer import RunWriter

warnings = []
writer = RunWriter(RunFolder(Path(sys.argv[1])), warn=warnings.append)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))  # from here on, as on a full disk
for step in range(1, 21):
    writer.metric({"step": step, "loss": 1 / step})
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.metric({"step": 21, "loss": 1 / 21})
writer.close()
print(json.dumps(warnings))
"""


def test_a_full_disk_causes_one_warning_and_loses_no_record(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE_WITH_A_LIMIT, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    (warning,) = json.loads(result.stdout)
    assert "metrics.jsonl cannot be written" in warning
    found = list(read_records(RunFolder(tmp_path).metrics))
    assert found == [{"step": step, "loss": 1 / step} for step in range(1, 22)]


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert list(read_records(tmp_path / "metrics.jsonl")) == []
    assert drop_metrics_after(tmp_path / "metrics.jsonl", 5) == 0
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_last_line_cut_at_any_byte_is_skipped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    kept = write(folder, 1, 2, 3)[:2]
    whole = folder.metrics.read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    for length in range(start, len(whole)):  # also inside a Chinese character
        folder.metrics.write_bytes(whole[:length])
        assert list(read_records(folder.metrics)) == kept
        assert drop_metrics_after(folder.metrics, 9) == (1 if length > start else 0)
        assert folder.metrics.read_bytes() == whole[:start]


def test_a_cut_line_does_not_corrupt_the_next_record(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(json.dumps({"step": 1}) + '\n{"step": 2, "lo', encoding="utf-8")
    folder.events.write_text('{"event": "sta', encoding="utf-8")
    writer = RunWriter(folder)
    writer.metric({"step": 2})
    writer.event("stopped", step=2)
    writer.close()
    assert list(read_records(folder.metrics)) == [{"step": 1}, {"step": 2}]
    assert last_outcome(folder) == "stopped"


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.integers(1, 30), max_size=20), last=st.integers(0, 31), torn=st.booleans())
def test_exactly_the_later_steps_are_dropped(
    steps: list[int], last: int, torn: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("drop") / "metrics.jsonl"
    steps = sorted(steps)
    lines = [json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records(*steps)]
    path.write_bytes(b"".join(lines) + (b'{"step": 1' if torn else b""))
    kept = [line for step, line in zip(steps, lines, strict=True) if step <= last]
    assert drop_metrics_after(path, last) == len(steps) - len(kept) + torn
    assert path.read_bytes() == b"".join(kept)
    assert os.listdir(path.parent) == ["metrics.jsonl"]
    assert drop_metrics_after(path, last) == 0


@pytest.mark.parametrize("width", [1, 100, 70_000, 200_000])
def test_records_of_any_length_are_dropped_from_the_end(width: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    wide = [{"step": step, "note": "中" * width} for step in range(1, 8)]
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in wide), encoding="utf-8")
    assert last_record(path) == wide[-1]
    assert drop_metrics_after(path, 4) == 3
    assert list(read_records(path)) == wide[:4]
    assert drop_metrics_after(path, 0) == 4
    assert (path.read_bytes(), last_record(path)) == (b"", None)


def test_infinity_as_written_by_python_is_read(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "spike", "limit": Infinity}\n')
    assert last_record(tmp_path / "events.jsonl") == {"event": "spike", "limit": float("inf")}


@pytest.mark.parametrize(
    ("events", "word"),
    [
        ([], None),
        (["checkpoint"], None),
        (["started"], "started"),
        (["started", "checkpoint", "stopped"], "stopped"),
        (["started", "stopped", "started", "checkpoint"], "started"),
        (["started", "stopped", "started", "done", "metrics_dropped"], "done"),
    ],
)
def test_the_last_outcome_of_a_run(events: list[str], word: str | None, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert last_outcome(folder) is None
    writer = RunWriter(folder)
    for event in events:
        writer.event(event, step=1)
    writer.close()
    assert last_outcome(folder) == word
    assert last_outcome(folder, "ours") is None


@pytest.mark.parametrize(
    ("events", "word"),
    [
        (["done"], None),
        (["started theirs", "done"], None),
        (["started ours", "requeue"], "requeue"),
        (["started ours", "failed", "started theirs", "done"], "failed"),
        (["started theirs", "started ours"], "started"),
    ],
)
def test_the_last_outcome_of_a_launch(events: list[str], word: str | None, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    writer = RunWriter(folder)
    for event in events:
        kind, _, launch = event.partition(" ")
        writer.event(kind, step=1, **({"launch": launch} if launch else {}))
    writer.close()
    assert last_outcome(folder, "ours") == word


@pytest.mark.parametrize(
    ("events", "reason", "is_recorded"),
    [
        ([], "out of memory", True),
        ([], NO_END, False),
        (["fault"], "out of memory", True),
        (["failed"], "another", False),
        (["started"], "out of memory", True),
        (["started", "checkpoint"], NO_END, True),
        (["started", "fault"], "out of memory", True),
        (["started", "stopped"], "out of memory", False),
        (["started", "done"], NO_END, False),
        (["started", "failed"], NO_END, False),
        (["started", "failed"], "the same", False),
        (["started", "failed", "started"], "the same", True),
    ],
)
def test_a_failure_is_recorded_once_unless_the_run_has_ended(
    events: list[str], reason: str, is_recorded: bool, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    write(folder, 1, 2)
    writer = RunWriter(folder)
    for event in events:
        writer.event(event, step=2, **({"reason": "the same"} if event == "failed" else {}))
    writer.close()
    record_failure(folder, reason)
    found = list(read_records(folder.events))
    assert len(found) == len(events) + is_recorded
    if is_recorded:
        assert (found[-1]["event"], found[-1]["step"], found[-1]["reason"]) == ("failed", 2, reason)


@pytest.mark.parametrize(
    ("before", "launch", "reasons"),
    [
        (["started", "stopped"], [], ["refused"]),
        (["started", "requeue"], ["fault"], ["refused"]),
        (["started", "failed"], [], ["refused"]),  # the same reason again is another attempt
        (["failed"], [], ["refused"]),
        (["started"], [], [NO_END, "refused"]),
        (["started", "done"], [], []),
        (["started", "done"], ["fault"], []),
        (["started", "done", "fault"], ["fault"], []),  # by another launch, which failed too
        (["started", "fault"], [], [NO_END, "refused"]),  # its launcher was killed while it restarted the ranks
        (["started", "done"], ["started"], ["refused"]),  # it had more steps
        (["started", "stopped"], ["failed"], []),
    ],
)
def test_a_launch_that_fails_before_its_start_is_recorded_unless_the_run_is_finished(
    before: list[str], launch: list[str], reasons: list[str], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    write(folder, 1, 2)
    writer = RunWriter(folder)
    for event in [*before, *launch]:
        writer.event(event, step=1, **({"reason": "refused"} if event == "failed" else {}))
    writer.close()
    events = len(before) + len(launch)
    record_failure(folder, "refused", len(before))
    record_failure(folder, "refused", len(before))
    found = list(read_records(folder.events))[events:]
    assert [(one["event"], one["step"], one["reason"]) for one in found] == [("failed", 2, why) for why in reasons]


def test_a_launch_that_fails_in_a_new_folder_writes_one_file(tmp_path: Path) -> None:
    record_failure(RunFolder(tmp_path), "refused")
    (event,) = read_records(tmp_path / "events.jsonl")
    assert (event["event"], event["step"], event["reason"]) == ("failed", 0, "refused")
    assert os.listdir(tmp_path) == ["events.jsonl"]


def test_a_failure_that_cannot_be_recorded_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    record_failure(RunFolder(tmp_path), "refused")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("the failure is not recorded: ") and "events.jsonl: is a link" in line


@pytest.mark.parametrize("job", ["waits", "has started", "has started after ours", "has started under our name"])
def test_a_failed_launch_leaves_the_run_of_another_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    monkeypatch.setattr("z2all_ds.track.writer.SILENT_SECONDS", 0.0)
    monkeypatch.setenv(LAUNCH_VARIABLE, "")  # restored afterwards
    folder, ours = RunFolder(tmp_path), name_launch()
    name_launch()  # of the next try
    lock = folder.acquire_lock()
    if job != "waits":
        writer = RunWriter(folder)
        for launch in [ours, ""] if "after" in job else [ours] if "our" in job else [""]:
            writer.event("started", step=3, **({"launch": launch} if launch else {}))
        writer.close()
    record_failed_launch(folder, "refused", 0)
    is_ours = job == "has started under our name"  # the process of a lost node may hold the lock for long
    assert (last_outcome(folder) == "failed") is is_ours
    os.close(lock)
    record_failed_launch(folder, "refused", 0)
    assert last_outcome(folder) == "failed"
    os.close(folder.acquire_lock())  # free again


def test_a_fifo_instead_of_records_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    os.mkfifo(folder.metrics)
    for read in (
        lambda: RunWriter(folder),
        lambda: drop_metrics_after(folder.metrics, 1),
        lambda: list(read_records(folder.metrics)),
        lambda: last_record(folder.metrics),
    ):
        with pytest.raises((DataError, ConfigError), match=r"metrics\.jsonl: .*not( a)? regular"):
            read()
