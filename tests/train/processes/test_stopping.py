"""A run that is asked to stop: it saves its last step, and its exit code says whether to requeue it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.marked import marked, new_mark, wait_until
from tests.helpers.training import metrics, run_arguments
from tests.helpers.warm_python import FRESH
from z2all_ds.base.errors import EXIT_INTERRUPTED, EXIT_REQUEUE
from z2all_ds.base.machine import default_environment, free_port
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import memory
from z2all_ds.checkpoint.layout import find_latest
from z2all_ds.track.writer import RunWriter, last_outcome
from z2all_ds.train.processes.stopping import requeue_on_signals, stop_on_signals

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


def test_a_request_that_cannot_be_written_is_one_line_and_the_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "deleted")
    with stop_on_signals(folder) as signals:
        signals.take(signal.SIGTERM, None)
        (line,) = capsys.readouterr().err.splitlines()
        assert f"SIGTERM: {folder.stop_request} cannot be written (No such file or directory)" in line
        with pytest.raises(KeyboardInterrupt, match="SIGUSR1"):
            signals.take(signal.SIGUSR1, None)


def test_the_answer_to_a_signal_says_whether_a_checkpoint_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)

    def answer(*kinds: str) -> str:
        """Return the answer while a launch has these events, after those of an earlier one."""
        folder.events.unlink(missing_ok=True)
        record(folder, "started", "first_step")
        with stop_on_signals(folder) as signals:
            record(folder, *kinds)
            signals.take(signal.SIGINT, None)
        return capsys.readouterr().err

    before, after = (
        f"SIGINT: the run will {what}; repeat to end it at once\n"
        for what in ("stop before its first step", "save a checkpoint and stop after this step")
    )
    assert answer() == before
    assert answer("started") == before
    assert answer("started", "first_step", "checkpoint") == after
    assert answer("started", "first_step", "fault") == before  # a restart
    assert answer("started", "first_step", "fault", "started", "first_step", "recovered") == after


def record(folder: RunFolder, *kinds: str) -> None:
    writer = RunWriter(folder)
    for kind in kinds:
        writer.event(kind, step=0)
    writer.close()


@pytest.fixture
def hangups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return a list that gets the SIGHUPs that nothing else handles; these tests may run under nohup."""
    taken: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, frame: taken.append(number))
    yield taken
    signal.signal(signal.SIGHUP, before)


def test_the_two_signals_at_the_end_of_a_terminal_session_are_one_request(
    hangups: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    with stop_on_signals(folder) as signals:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
        assert folder.stop_request.exists()
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received == signal.SIGHUP and hangups == []
    said = "SIGHUP: the run will stop before its first step; send SIGTERM to end it at once\n"
    assert capsys.readouterr().err == said


def test_under_nohup_the_end_of_a_terminal_session_changes_nothing(hangups: list[int], tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with requeue_on_signals(), stop_on_signals(RunFolder(tmp_path)) as signals:
        os.kill(os.getpid(), signal.SIGHUP)
    assert signals.received is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.usefixtures("hangups")
def test_a_signal_outside_of_training_ends_the_command_with_the_requeue_code(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, requeue_on_signals():
        os.kill(os.getpid(), number)
    assert ended.value.code == EXIT_REQUEUE
    said = f"{number.name}: ended outside of training; the same command starts or resumes the run\n"
    assert capsys.readouterr().err == said
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.extended)])
def test_a_signal_to_every_process_of_the_run_makes_it_save_and_stop(
    number: signal.Signals,
    tmp_path: Path,
    small_corpus: Path,
    small_tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """systemd, slurm and some containers signal all processes, not only the command."""
    monkeypatch.setenv(FRESH, "1")  # a process forked from a warm one does not inherit ignored signals
    more = ("data.num_workers=1", "checkpoint.snapshot_every=1")
    run = Running(BY_Z2ALL, tmp_path, small_corpus, small_tokenizer, *more)
    try:
        wait_until(lambda: run.folder.root in memory.all_snapshot_folders().values(), "a snapshot")
        for pid in marked(run.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        assert run.process.wait(60) == EXIT_REQUEUE, run.terminal.read_text()
        assert marked(run.mark) == {}
    finally:
        run.kill()
    assert run.has_saved_its_last_step()
    assert last_outcome(run.folder) == "requeue"


def test_a_second_start_in_the_same_folder_touches_nothing(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    run = Running(BY_Z2ALL, tmp_path, small_corpus, small_tokenizer, "checkpoint.snapshot_every=1")
    try:
        wait_until(lambda: run.folder.root in memory.all_snapshot_folders().values(), "a snapshot")
        arguments = run_arguments(run.folder.root, small_corpus, small_tokenizer, *ENDLESS)
        second = subprocess.Popen([*BY_Z2ALL, *arguments], start_new_session=True, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: _waits_for_lock(second.pid, run.folder.root / ".launch_lock"), "the second to wait")
        second.send_signal(signal.SIGINT)
        assert second.wait(60) == EXIT_INTERRUPTED
        assert run.process.poll() is None and not run.folder.stop_request.exists()
        assert last_outcome(run.folder) == "started"
        assert run.folder.root in memory.all_snapshot_folders().values()
        steps = run.steps_taken()
        wait_until(lambda: run.steps_taken() > steps + 1, "the first to go on")
    finally:
        run.kill()


def _waits_for_lock(pid: int, lock: Path) -> bool:
    """Return whether the process has opened the file, which it does before it waits."""
    links = list(Path(f"/proc/{pid}/fd").iterdir())
    return any(os.path.realpath(link) == str(lock) for link in links)


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
