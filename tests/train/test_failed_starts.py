"""Launches that fail before the run starts or continues: the reason is an event, once, and the board shows it."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.marked import marked, new_mark, wait_until
from tests.helpers.processes import ended
from tests.helpers.training import launch_script, run_arguments, train
from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import CheckpointError, ConfigError
from z2all_ds.base.fault_records import LAUNCH_VARIABLE
from z2all_ds.base.machine import default_environment, free_port
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.board.run import WatchedRun
from z2all_ds.track.files import Files
from z2all_ds.track.writer import last_outcome, read_records
from z2all_ds.train.command import RanksFailed, train_on_this_machine

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "pretrain.py"
NEEDS_A_GPU = "ops.rope=liger"
"""On a CPU the ranks find this error when they build the model."""
SHORT = ("deepspeed=zero1", "train.steps=4", "schedule.warmup_steps=1")
KILLED = "ClusterError: rank 0: its process was killed from outside"
ENDS = ("started", "stopped", "done", "failed")


@pytest.fixture(autouse=True)
def _no_launch_of_an_earlier_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCH_VARIABLE, "")  # removed afterwards


def outcomes(folder: RunFolder) -> list[tuple[str, int]]:
    return [(event["event"], event["step"]) for event in read_records(folder.events) if event["event"] in ENDS]


def last_event(folder: RunFolder) -> dict[str, Any]:
    *_, last = read_records(folder.events)
    return last


def on_the_board(folder: RunFolder) -> dict[str, Any]:
    run = WatchedRun(0, Files(), str(folder.root), str(folder.root))
    while run.update():
        pass
    return run.summary("x")


@pytest.mark.parametrize("by", ["z2all train", "deepspeed"])
def test_a_model_that_does_not_build_is_the_reason_of_a_new_run(
    by: str, tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    if by == "z2all train":
        done = train(folder.root, small_corpus, small_tokenizer, *SHORT, NEEDS_A_GPU)
    else:
        done = launch_script(SCRIPT, *run_arguments(folder.root, small_corpus, small_tokenizer, *SHORT, NEEDS_A_GPU))
    assert done.returncode == ConfigError.exit_code, done.stderr
    (event,) = read_records(folder.events)
    assert (event["event"], event["step"]) == ("failed", 0)
    assert event["reason"].startswith("ConfigError: ops.rope=liger: needs a GPU")
    assert not folder.metrics.exists() and not folder.config.exists()
    summary = on_the_board(folder)
    assert (summary["status"], summary["elapsed_seconds"], summary["goodput"]) == ("failed", 0.0, None)
    assert summary["note"] == event["reason"]


def test_the_last_attempt_to_continue_a_stopped_run_is_shown_until_one_succeeds(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    folder = RunFolder(tmp_path / "run")

    def start(*more: str) -> int:
        return train(folder.root, small_corpus, small_tokenizer, *SHORT, *more, ranks=1).returncode

    assert start("train.stop_at_step=2") == 0
    files = (folder.config, folder.ds_config, folder.environment, folder.metrics, folder.health)
    before = [file.read_bytes() for file in files]
    assert start("model.rope_theta=500") == CheckpointError.exit_code
    assert outcomes(folder) == [("started", 0), ("stopped", 2), ("failed", 2)]
    assert last_event(folder)["reason"].startswith("CheckpointError: model.rope_theta=500.0: ")
    assert [file.read_bytes() for file in files] == before
    assert on_the_board(folder)["status"] == "failed"

    assert start() == 0
    assert outcomes(folder)[3:] == [("started", 2), ("done", 4)]
    events, summary = folder.events.read_bytes(), on_the_board(folder)
    assert start("model.rope_theta=500") == CheckpointError.exit_code
    assert folder.events.read_bytes() == events, "a finished run stays finished"
    assert on_the_board(folder) == summary


@pytest.fixture
def rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the command of a rank 0 that loads and then waits for a rank 1 that never comes."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in {**default_environment(2), **place, **meeting}.items():
        monkeypatch.setenv(name, value)
    return [sys.executable, "-m", "z2all_ds.train.pretrain"]


def test_a_rank_that_is_killed_while_it_loads_is_the_reason(
    rank_0_alone: list[str],
    tmp_path: Path,
    small_corpus: Path,
    small_tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, mark = RunFolder(tmp_path / "run"), new_mark()
    for name, value in mark.items():
        monkeypatch.setenv(name, value)
    run = load_run_config(None, run_arguments(folder.root, small_corpus, small_tokenizer, *SHORT))

    def kill() -> None:
        wait_until_it_loads(folder)
        (rank,) = [pid for pid, line in marked(mark).items() if b"z2all_ds.train.pretrain" in line]
        os.kill(rank, signal.SIGKILL)

    with ThreadPoolExecutor() as threads:
        killed = threads.submit(kill)
        with pytest.raises(RanksFailed):
            train_on_this_machine(run, 2, command=lambda arguments, ranks, port: [*rank_0_alone, *arguments])
        killed.result()
    (event,) = read_records(folder.events)
    assert (event["event"], event["step"]) == ("failed", 0)
    assert event["reason"].startswith(KILLED)


@pytest.mark.parametrize("launch", ["", "0123"])
def test_the_watchdog_records_a_kill_while_loading_if_no_living_launcher_of_ours_does(
    launch: str,
    rank_0_alone: list[str],
    tmp_path: Path,
    small_corpus: Path,
    small_tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(LAUNCH_VARIABLE, launch)
    folder = RunFolder(tmp_path / "run")
    arguments = run_arguments(folder.root, small_corpus, small_tokenizer, *SHORT)
    with ended(subprocess.Popen([*rank_0_alone, *arguments], stderr=subprocess.DEVNULL)):
        wait_until_it_loads(folder)
    wait_until(lambda: last_outcome(folder) == "failed", "the watchdog")
    (event,) = read_records(folder.events)
    assert event["reason"].startswith(KILLED)


def wait_until_it_loads(folder: RunFolder) -> None:
    log = folder.rank_log(0)
    wait_until(lambda: log.exists() and "loading torch" in log.read_text(), "the rank to load")
