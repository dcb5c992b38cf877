"""A run that is asked to stop: it saves its last step, and its exit code says whether to requeue it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.marked import marked, new_mark, wait_until
from tests.helpers.training import metrics, run_arguments
from z2all_ds.base.errors import EXIT_INTERRUPTED, EXIT_REQUEUE
from z2all_ds.base.machine import default_environment, free_port
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import memory
from z2all_ds.checkpoint.layout import find_latest
from z2all_ds.track.writer import last_outcome

SCRIPT = Path(__file__).resolve().parents[3] / "launch" / "pretrain.py"
ENDLESS = ("deepspeed=zero2", "train.steps=1000000", "checkpoint.every_steps=1000000")


class Running:
    """A run that has taken a step and saved nothing yet."""

    def __init__(self, command: list[str], place: Path, corpus: Path, tokenizer: Path, *more: str) -> None:
        self.folder, self.mark, self.terminal = RunFolder(place / "run"), new_mark(), place / "terminal"
        arguments = run_arguments(self.folder.root, corpus, tokenizer, *ENDLESS, *more)
        with self.terminal.open("wb") as terminal:
            self.process = subprocess.Popen(
                [*command, *arguments],
                env={**os.environ, **default_environment(2), **self.mark},
                stdout=terminal,
                stderr=terminal,
                start_new_session=True,
            )
        wait_until(lambda: self.steps_taken() > 0 or self.process.poll() is not None, "a step")
        assert self.process.poll() is None, self.terminal.read_text()

    def steps_taken(self) -> int:
        return len(metrics(self.folder.root)) if self.folder.metrics.exists() else 0

    def has_saved_its_last_step(self) -> bool:
        newest, _ = find_latest(self.folder.checkpoints)
        return newest is not None and newest.step == metrics(self.folder.root)[-1]["step"]

    def kill(self) -> None:
        for number in marked(self.mark):
            os.kill(number, signal.SIGKILL)
        self.process.wait()


BY_Z2ALL = [sys.executable, "-m", "z2all_ds", "train", "--ranks", "2"]


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, EXIT_REQUEUE), (signal.SIGUSR1, EXIT_REQUEUE), (signal.SIGINT, EXIT_INTERRUPTED)],
)
def test_a_signal_makes_the_run_save_and_stop(
    number: signal.Signals, code: int, tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    run = Running(BY_Z2ALL, tmp_path, small_corpus, small_tokenizer)
    try:
        run.process.send_signal(number)
        assert run.process.wait(60) == code
        assert marked(run.mark) == {}
    finally:
        run.kill()
    assert run.has_saved_its_last_step()
    assert last_outcome(run.folder) == "requeue"
    assert not run.folder.stop_request.exists()
    said = run.terminal.read_text()
    assert f"{number.name}: the run will save a checkpoint and stop after this step" in said
    assert "stopped on request at step" in said and "Traceback" not in said and "Error" not in said


def test_a_second_ctrl_c_ends_the_run_immediately(tmp_path: Path, small_corpus: Path, small_tokenizer: Path) -> None:
    run = Running(BY_Z2ALL, tmp_path, small_corpus, small_tokenizer, "checkpoint.snapshot_every=1")
    try:
        wait_until(lambda: run.folder.root in memory.all_snapshot_folders().values(), "a snapshot")
        ranks = [pid for pid, line in marked(run.mark).items() if b"z2all_ds.train.pretrain" in line]
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)  # so that they cannot react to the first
        run.process.send_signal(signal.SIGINT)
        wait_until(lambda: "SIGINT: the run will save" in run.terminal.read_text(), "the first to be taken")
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(60) == EXIT_INTERRUPTED
        assert marked(run.mark) == {}
    finally:
        run.kill()
    assert "Traceback" not in run.terminal.read_text()
    assert run.folder.root not in memory.all_snapshot_folders().values()


def test_a_stop_request_file_stops_the_run_under_any_launcher(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(free_port())]
    run = Running([*launcher, str(SCRIPT)], tmp_path, small_corpus, small_tokenizer)
    try:
        run.folder.stop_request.touch()
        assert run.process.wait(60) == EXIT_REQUEUE
        wait_until(lambda: not marked(run.mark), "all processes to end")
    finally:
        run.kill()
    assert run.has_saved_its_last_step()
    assert last_outcome(run.folder) == "requeue"
    assert not run.folder.stop_request.exists()
