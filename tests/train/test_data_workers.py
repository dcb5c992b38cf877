"""Processes that make data ahead: they are there while a run trains, and gone with it, however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.marked import marked, new_mark, wait_until, workers
from tests.helpers.training import run_arguments
from z2all_ds.checkpoint.layout import find_latest
from z2all_ds.errors import EXIT_INTERRUPTED
from z2all_ds.machine import default_environment, free_port
from z2all_ds.run_folder import RunFolder

RANKS, WORKERS = 2, 2
SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "pretrain.py"


def command_line(launcher: str) -> list[str]:
    if launcher == "z2all":
        return [sys.executable, "-m", "z2all_ds", "train", "--ranks", str(RANKS)]
    of_deepspeed = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(RANKS)]
    return [*of_deepspeed, "--master_port", str(free_port()), str(SCRIPT)]


@pytest.mark.parametrize("launcher", ["z2all", "deepspeed"])
def test_ctrl_c_ends_ranks_and_workers(
    launcher: str, tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    """As a terminal does it: the signal goes to the whole group in the foreground."""
    settings = ("deepspeed=zero2", "train.steps=1000000", "checkpoint.every_steps=2", f"data.num_workers={WORKERS}")
    arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, *settings)
    mark, folder = new_mark(), RunFolder(tmp_path / "run")
    environment = {**os.environ, **default_environment(RANKS), **mark}
    with (tmp_path / "terminal").open("wb") as terminal:
        process = subprocess.Popen(
            [*command_line(launcher), *arguments],
            env=environment,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
    try:
        wait_until(lambda: find_checkpoint(folder) or process.poll() is not None, "a checkpoint")
        assert process.poll() is None, (tmp_path / "terminal").read_text()
        assert len(workers(mark)) == RANKS * WORKERS
        os.killpg(process.pid, signal.SIGINT)
        code = process.wait(timeout=60)
        if launcher == "z2all":
            assert code == EXIT_INTERRUPTED
            assert marked(mark) == {}
        assert code != 0
        wait_until(lambda: not marked(mark), "all processes to end", seconds=20)
    finally:
        for number in marked(mark):
            os.kill(number, signal.SIGKILL)
        process.wait()
    newest, _ = find_latest(folder.checkpoints)
    assert newest is not None  # what was saved is whole


def find_checkpoint(folder: RunFolder) -> bool:
    return folder.checkpoints.is_dir() and any(folder.checkpoints.glob("step_*/MANIFEST.json"))
