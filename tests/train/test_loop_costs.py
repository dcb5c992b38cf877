"""Times that a real run records: a short training, stopped two steps after a checkpoint without saving, and resumed."""

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.training import metrics, run_arguments, train_many
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.goodput import goodput
from z2all_ds.track.writer import read_records
from z2all_ds.train.processes.startup import PHASES

GLOBAL_BATCH, BATCH_TOKENS = 8, 8 * 32
STEPS, EVERY, STOPPED_AT = 12, 3, 8
PARTS = ("data_wait", "forward", "backward", "optimizer", "checkpoint", "validation", "other")
ROUNDING_SECONDS = 1e-6


@pytest.fixture(scope="module")
def run_dir(small_corpus: Path, small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train steps 1 to 8, then 7 to 12 from the checkpoint of step 6, and return the run folder."""
    folder = tmp_path_factory.mktemp("costs")
    common = (f"checkpoint.every_steps={EVERY}", "checkpoint.at_end=false")
    plan = [
        run_arguments(folder / "run", small_corpus, small_tokenizer, *common, *stop)
        for stop in ([f"train.stop_at_step={STOPPED_AT}"], [])
    ]
    assert train_many(folder, plan) == [0, 0]
    return folder / "run"


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_records(RunFolder(run_dir).events) if event["event"] == kind]


def test_the_parts_of_every_step_add_up_to_its_time(run_dir: Path) -> None:
    records = metrics(run_dir)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        parts = {part: record[f"{part}_seconds"] for part in PARTS}
        assert sum(parts.values()) == pytest.approx(record["step_seconds"], abs=len(PARTS) * ROUNDING_SECONDS)
        assert min(parts["forward"], parts["backward"], parts["optimizer"], parts["other"]) > 0
        assert record["mfu"] is record["mfu_exact"] is record["hfu"] is None
        assert 0 < record["memory_bytes"] <= record["peak_memory_bytes"]


def test_the_time_of_a_save_is_recorded_by_the_step_after_it(run_dir: Path) -> None:
    spent = {record["step"]: record["checkpoint_seconds"] for record in metrics(run_dir)}
    # Step 7 was repeated after the resume; the second training did not save the checkpoint of step 6.
    assert [step for step, seconds in spent.items() if seconds] == [4, 10]
    written = {event["step"]: event["seconds"] for event in events(run_dir, "saved")}
    assert list(written) == [3, 6, 9, 12]
    assert {step - 1: round(seconds, 3) for step, seconds in spent.items() if seconds} == {3: written[3], 9: written[9]}


def test_each_start_records_its_phases(run_dir: Path) -> None:
    first, second = events(run_dir, "first_step")
    assert (first["step"], second["step"]) == (1, 7)
    for event in (first, second):
        phases = {phase: event[f"{phase}_seconds"] for phase in PHASES}
        assert sum(phases.values()) == pytest.approx(event["seconds"], abs=0.0005 * (len(PHASES) + 1))
        assert min(phases[phase] for phase in ("model", "engine", "data", "restore", "first_step")) > 0
    # The second training runs in the same process, where torch is loaded and the process group exists already. Its time
    # counts from its own start.
    assert first["imports_seconds"] > second["imports_seconds"]
    between = second["time_unix"] - first["time_unix"]
    assert second["seconds"] < between
    log = (run_dir / "logs" / "rank_0000.log").read_text()
    printed_seconds = [float(seconds) for seconds in re.findall(r"first loss after ([\d.]+) s: ", log)]
    for event in (first, second):  # in seconds, rounded to 0.1 in the log and to 0.001 in the event
        assert any(seconds == pytest.approx(event["seconds"], abs=0.06) for seconds in printed_seconds)


def test_records_contain_hosts_mixture_and_the_costs_of_each_rank(run_dir: Path) -> None:
    folder, here = RunFolder(run_dir), socket.gethostname()
    for started in events(run_dir, "started"):
        (stage,) = started["mixture"]
        assert (started["steps"], started["hosts"]) == (STEPS, [here, here])
        assert (stage["first_step"], sum(stage["shares"].values())) == (0, pytest.approx(1))
    for record in metrics(run_dir):
        counted = {name.removeprefix("tokens_of_"): n for name, n in record.items() if name.startswith("tokens_of_")}
        assert set(counted) == {name.removeprefix("loss_of_") for name in record if name.startswith("loss_of_")}
        assert set(counted) <= set(stage["shares"])
        assert 0 < sum(counted.values()) <= BATCH_TOKENS
        assert record["data_position"] == record["step"] * GLOBAL_BATCH
    for health in read_records(folder.health):
        assert all(len(health[name]) == 2 for name in ("work_seconds", "data_wait_seconds", "memory_bytes"))
        assert min(health["work_seconds"]) > 0 and min(health["memory_bytes"]) > 1 << 20
    assert next(read_records(folder.health))["step"] == 1


def test_goodput_counts_no_step_twice(run_dir: Path) -> None:
    folder = RunFolder(run_dir)
    (stopped,), (done,) = events(run_dir, "stopped"), events(run_dir, "done")
    assert 0 < stopped["goodput"] < 1 and 0 < done["goodput"] < 1
    used = goodput(read_records(folder.events), read_records(folder.metrics))
    # The event's value was computed shortly before the event was written, and is rounded to four places.
    assert used.share == pytest.approx(done["goodput"], rel=0.01, abs=0.0001)
    records = metrics(run_dir)
    computing = sum(r["step_seconds"] - r["data_wait_seconds"] - r["checkpoint_seconds"] for r in records)
    assert used.counted_seconds == pytest.approx(computing)
    first, second = events(run_dir, "first_step")
    assert used.wall_seconds >= first["seconds"] + (second["time_unix"] - first["time_unix"])
    # Steps 7 and 8 were taken twice; the time of their first execution is lost.
    assert used.lost_seconds > 0
    assert used.startup_seconds == pytest.approx(
        sum(event["seconds"] - event["first_step_seconds"] for event in (first, second))
    )
    shown = re.findall(r"goodput ([\d.]+)% of ", (run_dir / "logs" / "rank_0000.log").read_text())
    assert float(shown[0]) == pytest.approx(100 * stopped["goodput"], abs=0.06)
    assert float(shown[-1]) == pytest.approx(100 * done["goodput"], abs=0.06)
