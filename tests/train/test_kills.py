"""SIGKILL at random moments while runs save almost continuously: every resume works, and losses do not change."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import ROOT
from tests.helpers.training import losses, run_arguments
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import memory
from z2all_ds.checkpoint.layout import step_folders

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "killed_runs.py"
BUSY_SAVING = (
    "deepspeed=zero1",
    "model.hidden_size=128",
    "model.intermediate_size=512",
    "train.global_batch=4",
    "train.dry_run=false",
    "train.steps=100000",
    "schedule.kind=constant",
    "checkpoint.snapshot_every=1",
    "checkpoint.every_steps=2",
)


def kills(seed: int, number: int, victims: list[int], forget: bool) -> list[dict[str, Any]]:
    """Return a random plan of kills for `killed_runs.py`.

    Every second kill waits for a save in progress. The duration of a save varies between machines and runs, so random
    delays alone may never hit one.
    """
    chance = random.Random(seed)
    plan = []
    for number_of_kill in range(number):
        aimed = number_of_kill % 2 == 0
        kill = {
            "place": ("memory", "disk")[number_of_kill // 2 % 2] if aimed else chance.choice(["memory", "disk"]),
            "changes": chance.randint(1, 6),
            "half_done": aimed,
            "delay_seconds": 0.0 if aimed else chance.uniform(0.0, 0.02),
            "victims": victims,
            "with_children": aimed,
            "forget_memory": forget and chance.random() < 0.5,
        }
        plan.append(kill)
    return plan


def killed_again_and_again(place: Path, arguments: list[str], ranks: int, plan: list[dict[str, Any]]) -> dict[str, Any]:
    content = {
        "arguments": arguments,
        "run_dir": str(place / "run"),
        "ranks": ranks,
        "kills": plan,
    }
    file = place / "plan.json"
    file.write_text(json.dumps(content))
    command = [sys.executable, str(SCRIPT), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def log_of(place: Path) -> str:
    return (place / "run" / "logs" / "rank_0000.log").read_text()


def assert_unbroken(place: Path, answer: dict[str, Any], arguments: list[str], ranks: int) -> None:
    """Assert that each step is recorded once, with the losses of an uninterrupted run."""
    assert answer["codes"] == [0] * ranks, log_of(place)[-3000:]
    alone = [*arguments, "checkpoint.snapshot_every=0", "checkpoint.background=never", "checkpoint.every_steps=100000"]
    result = train_alone(place / "alone", [*alone, f"train.stop_at_step={answer['end_step']}"], ranks)
    assert result.returncode == 0, result.stderr
    assert losses(place / "run") == losses(place / "alone")


def train_alone(run_dir: Path, arguments: list[str], ranks: int) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as in the forked ranks, so that sums have the same order
    command = [sys.executable, "-m", "z2all_ds", "train", "--ranks", str(ranks), *arguments, f"run_dir={run_dir}"]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.extended
def test_a_run_survives_fifty_kills_without_losing_a_step(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, *BUSY_SAVING)
    plan = kills(20261116, 50, [0], forget=True)
    answer = killed_again_and_again(tmp_path, arguments, 1, plan)
    found, log = answer["found"], log_of(tmp_path)
    assert len(found) == 50
    # The kills hit saves: many left an incomplete checkpoint, many only one complete snapshot.
    assert sum(bool(after["partial"]) for after in found) >= 10
    assert sum(len(after["in_memory"]) == 1 for after in found) >= 5
    assert all("never finished" in line for after in found for line in after["damaged"])
    # Runs resumed from memory if snapshots were left, otherwise from the disk.
    assert log.count("in memory") >= 15
    assert log.count("resumed from step_") - log.count(" in memory") >= 5
    assert_unbroken(tmp_path, answer, arguments, 1)
    assert_nothing_is_left(RunFolder(tmp_path / "run"))


def test_a_run_of_two_ranks_resumes_after_one_dies_during_a_save(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    """The other rank ends by itself, and the run resumes on both."""
    arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, *BUSY_SAVING)
    plan = kills(7, 2, [1], forget=False) + kills(8, 1, [0], forget=False)
    answer = killed_again_and_again(tmp_path, arguments, 2, plan)
    assert log_of(tmp_path).count("resumed from step_") == 3
    assert_unbroken(tmp_path, answer, arguments, 2)
    assert_nothing_is_left(RunFolder(tmp_path / "run"))


def assert_nothing_is_left(folder: RunFolder) -> None:
    line = memory.snapshot_folder(folder)
    assert line and not line.path.exists()
    assert list(folder.checkpoints.glob(".tmp_*")) == []
    assert set(folder.checkpoints.iterdir()) == set(step_folders(folder.checkpoints))
