"""Starting ranks: the launcher's command line, the number of ranks, and a port in use."""

import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.training import losses, run_arguments
from z2all_ds.base import child_process
from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import ClusterError
from z2all_ds.base.machine import free_port
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.train.processes import local_ranks
from z2all_ds.train.processes.local_ranks import check_ranks, deepspeed_command, rank_arguments, run_local_ranks
from z2all_ds.train.processes.starter import STOP_SIGNALS


def test_the_command_line_of_the_deepspeed_launcher() -> None:
    command = deepspeed_command(["--config", "my run.yaml", "train.steps=5"], ranks=3, port=29501)
    assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    assert command[-3:] == ["--config", "my run.yaml", "train.steps=5"]
    options = dict(zip(command[3:-5:2], command[4:-5:2], strict=True))
    assert options == {
        "--hostfile": "/dev/null/none",
        "--num_gpus": "3",
        "--master_port": "29501",
        "--log_level": "error",
    }
    assert command[-5:-3] == ["--module", "z2all_ds.train.pretrain"]
    assert not Path(options["--hostfile"]).exists()


def test_the_folder_with_the_arguments_of_ranks_is_one_that_they_accept(tmp_path: Path) -> None:
    """Also without a launch around them, as in `z2all bench memory`."""
    folder = RunFolder(tmp_path / "run")
    arguments = rank_arguments(load_run_config(None, [f"run_dir={folder.root}"]))
    assert arguments == ["--config", str(folder.launch_config), "--resume", "auto"]
    folder.claim()


@pytest.mark.parametrize(
    ("ranks", "gpus", "rule"),
    [(0, 0, "must be at least 1"), (-1, 0, "must be at least 1"), (0, 2, "must be 1 to 2"), (3, 2, "must be 1 to 2")],
)
def test_invalid_numbers_of_ranks_are_refused(ranks: int, gpus: int, rule: str) -> None:
    with pytest.raises(ClusterError, match=f"^ranks={ranks}: {rule}"):
        check_ranks(ranks, gpus)


@pytest.mark.parametrize(("ranks", "gpus"), [(1, 0), (64, 0), (1, 2), (2, 2)])
def test_valid_numbers_of_ranks_are_accepted(ranks: int, gpus: int) -> None:
    check_ranks(ranks, gpus)


def words_of(process: psutil.Process) -> str:
    """Return its command line; empty for a zombie, perhaps of an earlier test."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def test_signals_are_blocked_only_while_the_starter_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked: list[set[int]] = []

    def start(*arguments: Any, **options: Any) -> Any:
        blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        os.kill(os.getpid(), signal.SIGUSR1)
        return child_process.start([sys.executable, "-c", "import time; time.sleep(600)"], **options)

    def receive(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local_ranks, "start", start)
    before = signal.signal(signal.SIGUSR1, receive)
    try:
        with pytest.raises(KeyboardInterrupt):  # when the child has started, which is then ended
            run_local_ranks([], 1, tmp_path / "logs" / "log")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert blocked == [set(STOP_SIGNALS)]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    assert not [child for child in psutil.Process().children() if "time.sleep(600)" in words_of(child)]


def test_a_port_in_use_is_replaced_by_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    """Another process takes the port after it was found free and before rank 0 binds it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1], free_port()]
        monkeypatch.setattr(local_ranks, "free_port", lambda: ports.pop(0))
        arguments = run_arguments(
            tmp_path / "run", small_corpus, small_tokenizer, "train.steps=1", "schedule.warmup_steps=0"
        )
        assert run_local_ranks(arguments, 2, tmp_path / "launcher.log") == 0
    assert ports == []
    assert len(losses(tmp_path / "run")) == 1
    assert "PortTaken: port" in (tmp_path / "run" / "logs" / "rank_0000.log").read_text()
