"""The end of a rank's process, its record, and a rank whose folder belongs to another job."""

import logging
import os
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch.distributed

from z2all_ds.base import run_folder
from z2all_ds.base.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_REQUEUE,
    CheckpointError,
    ConfigError,
    DataError,
    TrainingError,
)
from z2all_ds.base.fault_records import LAUNCH_VARIABLE, OUT_OF_MEMORY, Fault, has_fault, write_fault
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.world import World
from z2all_ds.track.writer import RunWriter, read_records
from z2all_ds.train import pretrain
from z2all_ds.train.rank import Rank


@pytest.mark.parametrize(("code", "leaves"), [(EXIT_OK, True), (EXIT_REQUEUE, True), (TrainingError.exit_code, False)])
def test_after_a_success_a_rank_leaves_the_process_group(
    code: int, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of a group that is left to the interpreter's end abort the process now and then, after `done`."""
    left: list[bool] = []
    monkeypatch.setattr(pretrain, "main", lambda: code)
    monkeypatch.setattr(logging, "shutdown", lambda: None)  # it would close the handlers of pytest
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: left.append(True))
    with pytest.raises(SystemExit) as ended:
        pretrain.run()
    assert ended.value.code == code and bool(left) == leaves


class StandIn:
    """Replaces the output and the heartbeat of a rank in this process."""

    said: ClassVar[list[str]] = []

    def __init__(self, *arguments: object) -> None: ...

    def beat(self) -> None: ...

    def end(self) -> None: ...

    def fail(self, text: str, show: bool) -> None:
        self.said.append(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Return a run folder for ranks in this process, started without a launcher of ours."""
    monkeypatch.setattr(StandIn, "said", [])
    monkeypatch.setattr(run_folder, "LOCK_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(pretrain, "follow_owner", lambda: None)
    monkeypatch.setattr(pretrain, "RankOutput", StandIn)
    monkeypatch.setattr(pretrain, "Progress", StandIn)
    monkeypatch.setattr(pretrain, "set_compile_cache", lambda: None)
    monkeypatch.setenv(LAUNCH_VARIABLE, "")
    return RunFolder(tmp_path)


def end_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def check_inputs(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(pretrain, "check_inputs", check_inputs)


def recorded(folder: RunFolder) -> list[tuple[str, str | None]]:
    return [(event["event"], event.get("reason")) for event in read_records(folder.events)]


def record(folder: RunFolder, kind: str, **details: str) -> None:
    writer = RunWriter(folder)
    writer.event(kind, step=1, **details)
    writer.close()


def test_a_rank_that_is_refused_the_lock_leaves_nothing_in_the_folder(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(folder, "started")
    lock = folder.acquire_lock()
    try:
        assert pretrain.main([f"run_dir={folder.root}"]) == CheckpointError.exit_code
    finally:
        os.close(lock)
    assert "another job is writing to it" in StandIn.said[0]
    assert not folder.faults.exists()
    assert recorded(folder) == [("started", None)]


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (DataError("corpus c", "is gone", "Find it."), 3, "DataError: corpus c: is gone. Find it."),
        (ImportError("libcudart.so:\nno such file"), 1, "ImportError: libcudart.so: no such file"),
        (KeyboardInterrupt(), 130, "ended at once by SIGINT"),
    ],
)
@pytest.mark.parametrize("launch", ["", "0123"])
def test_rank_0_records_why_it_ends_before_the_start_unless_its_launcher_does(
    launch: str, error: BaseException, code: int, reason: str, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_with(monkeypatch, error)
    monkeypatch.setenv(LAUNCH_VARIABLE, launch)
    assert pretrain.main([f"run_dir={folder.root}"]) == code
    assert recorded(folder) == ([] if launch else [("failed", reason)])
    os.close(folder.acquire_lock())  # it is free


def test_rank_0_trains_in_the_folder_that_it_has_locked(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[bool] = []

    def train_rank(rank: Rank) -> str:
        lost.append(rank.folder.is_lost)
        (folder.root / ".lock").rename(folder.root / "old")
        lost.append(rank.folder.is_lost)
        return "done"

    monkeypatch.setattr(pretrain, "check_inputs", lambda *arguments: None)
    monkeypatch.setattr(pretrain, "train_rank", train_rank)
    assert pretrain.main([f"run_dir={folder.root}"]) == EXIT_OK
    assert lost == [False, True]


def test_a_finished_run_is_not_failed_by_another_start(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    record(folder, "done")
    end_with(monkeypatch, DataError("corpus c", "is gone", "Find it."))
    assert pretrain.main([f"run_dir={folder.root}"]) == DataError.exit_code
    assert recorded(folder) == [("done", None)]


@pytest.mark.parametrize("has_started", [False, True])
def test_the_error_of_another_rank_that_failed_first_is_the_reason(
    has_started: bool, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_rank_1(*arguments: object) -> None:
        if has_started:
            record(folder, "started")
            record(folder, "failed", reason="LostPeer: another rank")
        write_fault(folder, Fault(OUT_OF_MEMORY, 1, "here", "OutOfMemoryError: rank 1", 1))
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(pretrain, "check_inputs", lose_rank_1)
    write_fault(folder, Fault("data", 2, "here", "DataError: of an earlier start", 3, time_unix=time.time() - 60))
    assert pretrain.main([f"run_dir={folder.root}"]) == EXIT_BUG
    started = [("started", None), ("failed", "LostPeer: another rank")] if has_started else []
    assert recorded(folder) == [*started, ("failed", "OutOfMemoryError: rank 1")]


def test_a_direct_start_leaves_a_folder_of_others_as_it_is(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder.config.write_text("mine")
    assert pretrain.main([f"run_dir={folder.root}"]) == ConfigError.exit_code
    assert capfd.readouterr().err.startswith(f"ConfigError: run_dir={folder.root}: has run.yaml, which a run would")
    assert [path.name for path in folder.root.iterdir()] == ["run.yaml"]
    folder.config.unlink()
    end_with(monkeypatch, KeyboardInterrupt())
    assert pretrain.main([f"run_dir={folder.root}"]) == EXIT_INTERRUPTED
    folder.config.touch()
    folder.events.unlink()
    folder.require_ours()  # a run that was killed early has used it


def test_a_rank_other_than_0_records_nothing(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    end_with(monkeypatch, DataError("corpus c", "is gone", "Find it."))
    monkeypatch.setattr(pretrain.World, "take_from_environment", lambda: World(1, 2, 1, 2))
    assert pretrain.main([f"run_dir={folder.root}"]) == DataError.exit_code
    assert not folder.events.exists() and has_fault(folder, 1)
