"""`z2all train`: the checks before ranks are started, in the order in which a person fixes what they report, and the
recorded reason for the end of a run."""

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from z2all_ds.base import machine, run_folder
from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import EXIT_REQUEUE, ConfigError, MachineError
from z2all_ds.base.fault_records import BUG, KILLED, LAUNCH_VARIABLE, Fault, write_fault
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.writer import NO_END, RunWriter, read_records
from z2all_ds.train import command
from z2all_ds.train.command import check_run_folder
from z2all_ds.train.pretrain import parse


@pytest.mark.parametrize(
    ("overrides", "saves"),
    [
        ([], True),
        (["checkpoint.at_end=false"], False),  # as `z2all bench step`
        (["checkpoint.at_end=false", "checkpoint.every_steps=20"], True),
        (["checkpoint.at_end=false", "checkpoint.every_steps=21"], False),
        (["checkpoint.at_end=false", "checkpoint.every_steps=11", "train.stop_at_step=10"], False),
    ],
)
def test_disk_space_for_a_checkpoint_is_required_only_of_a_run_that_saves(
    overrides: list[str], saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = machine.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    run = load_run_config(None, [f"run_dir={tmp_path / 'run'}", "train.steps=20", *overrides])
    if not saves:
        check_run_folder(run)
        assert (tmp_path / "run").is_dir()
        return
    with pytest.raises(MachineError, match="a checkpoint of this model needs"):
        check_run_folder(run)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--steps", "5"], "ConfigError: --steps: is a setting, not an option. Write train.steps=5."),
        (["--nodes=5"], "ConfigError: argument '--nodes=5': is not one of `z2all train`. See `z2all train --help`."),
    ],
)
def test_arguments_of_ranks_and_of_launch_are_answered_in_the_same_way(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["train.steps=3", *arguments])
    assert caught.value.code == ConfigError.exit_code
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize(
    ("code", "exit_code", "rule"),
    [
        (3, 3, "stopped with exit code 3 (data error)"),
        (1, 1, "stopped with exit code 1"),
        (0, 5, "ended without a recorded outcome"),
    ],
)
def test_a_failed_run_names_the_kind_of_its_error(
    code: int, exit_code: int, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_local_ranks", lambda *arguments: code)
    run, folder = load_run_config(None, [f"run_dir={tmp_path}"]), RunFolder(tmp_path)
    with pytest.raises(command.RanksFailed) as caught:
        command._train(run, folder, 1, "auto", command.local_command, {})
    fix = f"See the lines above and {tmp_path / 'logs'}; the same command resumes from the last checkpoint."
    assert str(caught.value) == f"training in {tmp_path}: {rule}. {fix}"
    assert caught.value.exit_code == exit_code


def record(folder: RunFolder, kind: str, **details: Any) -> None:
    writer = RunWriter(folder)
    writer.event(kind, step=1, **details)
    writer.close()


def reasons_after(folder: RunFolder, ranks: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run a launch whose ranks do this and end with code 4; return the recorded reasons."""

    def run_local_ranks(*arguments: Any) -> int:
        ranks()
        return 4

    monkeypatch.setattr(command, "run_local_ranks", run_local_ranks)
    run = load_run_config(None, [f"run_dir={folder.root}"])
    with pytest.raises((command.RanksFailed, KeyboardInterrupt)):
        command._train(run, folder, 1, "auto", command.local_command, {})
    return [event["reason"] for event in read_records(folder.events) if event["event"] == "failed"]


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ([], ["DataError: other data"]),
        (["started", "stopped"], ["DataError: other data"]),
        (["started"], [NO_END, "DataError: other data"]),  # it was killed
        (["started", "done"], []),
    ],
)
def test_ranks_that_fail_before_the_start_are_the_reason_unless_the_run_is_finished(
    before: list[str], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    for event in before:
        record(folder, event)
    refusal = Fault("data", 0, "here", "DataError: other data", 4)
    assert reasons_after(folder, lambda: write_fault(folder, refusal), monkeypatch) == expected


def test_without_a_fault_record_the_exit_code_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = reasons_after(RunFolder(tmp_path), lambda: None, monkeypatch)
    assert reasons == ["stopped with exit code 4 (checkpoint error)"]


def test_ranks_that_are_refused_by_another_job_change_nothing_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started without `z2all train` and took the lock first."""
    monkeypatch.setattr(run_folder, "LOCK_PATIENCE_SECONDS", 0.0)
    folder = RunFolder(tmp_path)
    record(folder, "started")
    lock = folder.acquire_lock()
    try:
        lost = Fault("lost_peer", 1, "here", "LostPeer: another rank", 5)
        assert reasons_after(folder, lambda: write_fault(folder, lost), monkeypatch) == []
    finally:
        os.close(lock)
    assert [event["event"] for event in read_records(folder.events)] == ["started"]


def test_the_outcome_of_an_earlier_launch_is_not_that_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_local_ranks", lambda *arguments: 0)
    record(RunFolder(tmp_path), "stopped")
    run = load_run_config(None, [f"run_dir={tmp_path}"])
    with pytest.raises(command.RanksFailed, match="ended without a recorded outcome"):
        command._train(run, RunFolder(tmp_path), 1, "auto", command.local_command, {})


@pytest.mark.parametrize("has_fault_record", [False, True])
def test_only_a_fault_record_is_added_to_a_recorded_reason(
    has_fault_record: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk there is none."""
    folder = RunFolder(tmp_path)

    def fail() -> None:
        record(folder, "started")
        record(folder, "failed", reason="NotSaved: no space left")
        if has_fault_record:
            write_fault(folder, Fault(BUG, 1, "here", "the cause", 4))

    expected = ["NotSaved: no space left", *(["the cause"] if has_fault_record else [])]
    assert reasons_after(folder, fail, monkeypatch) == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("place", ["check_before_launch", "_train", "waiting for the lock"])
def test_a_signal_before_the_start_of_the_ranks_ends_the_command_with_the_requeue_code(
    number: signal.Signals, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive(*arguments: Any) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr(command, "check_before_launch", lambda *arguments: None)
    if place == "waiting for the lock":
        monkeypatch.setattr(run_folder.time, "sleep", receive)
    else:
        monkeypatch.setattr(command, place, receive)
    folder = RunFolder(tmp_path)
    with folder.launching() if place == "waiting for the lock" else nullcontext(), pytest.raises(SystemExit) as ended:
        command.train_on_this_machine(load_run_config(None, [f"run_dir={tmp_path}"]), 1)
    assert ended.value.code == EXIT_REQUEUE
    with folder.launching():  # the locks are free
        pass


def test_a_fault_of_another_start_in_the_folder_is_not_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks have no name of a launch, or another one."""
    folder = RunFolder(tmp_path)

    def fail() -> None:
        record(folder, "started")
        ours = os.environ[LAUNCH_VARIABLE]
        write_fault(folder, Fault(KILLED, 0, "here", "killed", 5))
        for other in ("", "0123"):
            monkeypatch.setenv(LAUNCH_VARIABLE, other)
            write_fault(folder, Fault("data", 1, "here", "DataError: the intruder", 3))
        monkeypatch.setenv(LAUNCH_VARIABLE, ours)

    assert reasons_after(folder, fail, monkeypatch) == ["killed"]


@pytest.mark.parametrize("has_started", [True, False])
def test_a_second_signal_is_recorded_by_its_name(
    has_started: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)

    def end() -> None:
        if has_started:
            record(folder, "started")
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)

    assert reasons_after(folder, end, monkeypatch) == ["ended at once by a second signal, SIGTERM"]
