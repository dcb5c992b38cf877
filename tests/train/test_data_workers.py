"""Data worker processes: they run while training runs and end with it, however it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.marked import marked, new_mark, wait_until, workers
from tests.helpers.training import run_arguments
from z2all_ds.base.errors import EXIT_INTERRUPTED, MachineError
from z2all_ds.base.machine import default_environment, free_port
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint.layout import find_latest

RANKS, WORKERS = 2, 2
SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "pretrain.py"


def command_line(launcher: str) -> list[str]:
    if launcher == "z2all":
        return [sys.executable, "-m", "z2all_ds", "train", "--ranks", str(RANKS)]
    of_deepspeed = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(RANKS)]
    return [*of_deepspeed, "--master_port", str(free_port()), str(SCRIPT)]


@dataclass(frozen=True)
class Running:
    """A run with workers that has saved a checkpoint."""

    process: subprocess.Popen[bytes]
    mark: dict[str, str]
    folder: RunFolder
    terminal: Path


@contextmanager
def running(launcher: str, place: Path, corpus: Path, tokenizer: Path) -> Iterator[Running]:
    settings = ("deepspeed=zero2", "train.steps=1000000", "checkpoint.every_steps=2", f"data.num_workers={WORKERS}")
    arguments = run_arguments(place / "run", corpus, tokenizer, *settings)
    mark, folder = new_mark(), RunFolder(place / "run")
    with (place / "terminal").open("wb") as terminal:
        process = subprocess.Popen(
            [*command_line(launcher), *arguments],
            env={**os.environ, **default_environment(RANKS), **mark},
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
    try:
        wait_until(lambda: has_checkpoint(folder) or process.poll() is not None, "a checkpoint")
        assert process.poll() is None, (place / "terminal").read_text()
        assert len(workers(mark)) == RANKS * WORKERS
        yield Running(process, mark, folder, place / "terminal")
    finally:
        for number in marked(mark):
            os.kill(number, signal.SIGKILL)
        process.wait()
    newest, _ = find_latest(folder.checkpoints)
    assert newest is not None  # an intact checkpoint


def has_checkpoint(folder: RunFolder) -> bool:
    return folder.checkpoints.is_dir() and any(folder.checkpoints.glob("step_*/MANIFEST.json"))


@pytest.mark.parametrize("launcher", ["z2all", "deepspeed"])
def test_ctrl_c_ends_ranks_and_workers(
    launcher: str, tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    """The signal goes to the whole process group, as from a terminal."""
    with running(launcher, tmp_path, small_corpus, small_tokenizer) as run:
        os.killpg(run.process.pid, signal.SIGINT)
        code = run.process.wait(timeout=60)
        if launcher == "z2all":
            assert code == EXIT_INTERRUPTED
            assert marked(run.mark) == {}
        assert code != 0
        wait_until(lambda: not marked(run.mark), "all processes to end", seconds=20)


def test_a_killed_worker_ends_the_run_with_a_one_line_error(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    """SIGKILL is what the kernel sends when the machine is out of memory."""
    with running("z2all", tmp_path, small_corpus, small_tokenizer) as run:
        os.kill(workers(run.mark)[0], signal.SIGKILL)
        assert run.process.wait(timeout=120) == MachineError.exit_code
        assert marked(run.mark) == {}
        *_, line, judged = run.terminal.read_text().splitlines()
        assert line.startswith("MachineError: a data worker: ended unexpectedly")
        assert "data.num_workers" in line
        assert judged.startswith("RanksFailed: ")
