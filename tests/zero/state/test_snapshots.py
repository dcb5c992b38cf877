"""Tests of snapshots of real engines: they equal checkpoints bit for bit, and a complete one always exists."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoints import read_whole
from tests.zero.engines import tiny_engine, train
from tests.zero.state.states import assert_same_state
from z2all_ds.base.config import load_run_config
from z2all_ds.base.console import human_bytes
from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.run_folder import RunFolder, file_id
from z2all_ds.base.world import World
from z2all_ds.checkpoint import memory
from z2all_ds.checkpoint.background import Answer
from z2all_ds.checkpoint.layout import find_latest
from z2all_ds.checkpoint.memory import SnapshotFolder
from z2all_ds.checkpoint.retention import Retention
from z2all_ds.checkpoint.snapshot_check import why_files_damaged
from z2all_ds.checkpoint.state_files import Entry, StateReader, write_tensors
from z2all_ds.checkpoint.writer import Job
from z2all_ds.zero.state import manager as manager_module
from z2all_ds.zero.state.engine_state import has_needed_files
from z2all_ds.zero.state.manager import CheckpointManager
from z2all_ds.zero.state.save import plan_save, restore, save_checkpoint
from z2all_ds.zero.state.snapshots import MappedStateFile, Snapshots, why_not_in_memory

STATE_FILE = "state/rank_00000.safetensors"


def take(taking: Snapshots, engine: Any, step: int, busy: int | None = None) -> None:
    taking.take(plan_save(engine, step, {}, {"position": 7}), busy)


@contextmanager
def snapshots(run_dir: Path) -> Iterator[tuple[Snapshots, SnapshotFolder]]:
    folder = SnapshotFolder(memory.new_lineage())
    taking = Snapshots(folder, run_dir, World(), torch.device("cpu"))
    try:
        yield taking, folder
    finally:
        taking.close()
        folder.remove()


def weights(path: Path) -> dict[str, torch.Tensor]:
    reader = StateReader(path)
    return {name: read_whole(reader, name).clone() for name in reader.shapes}


@pytest.mark.parametrize("json", ["zero0", "zero1", "zero2_offload", "zero3"])
def test_a_snapshot_equals_a_checkpoint_bit_for_bit(json: str, tmp_path: Path) -> None:
    with tiny_engine("cpu", f"deepspeed={json}") as (engine, _), snapshots(tmp_path) as (taking, folder):
        train(engine, 4)
        taking.prepare(engine)
        saved = save_checkpoint(engine, tmp_path / "checkpoints", 4, {}, {}, Retention(2))
        take(taking, engine, 4)
        (snapshot,) = folder.snapshots()
        assert_same_state(saved, snapshot.path)
        assert snapshot.data_state == {"position": 7} and snapshot.trainer["step"] == 4
        expected = train(engine, 3)
        restore(engine, snapshot)
        assert train(engine, 3) == expected


def test_slots_alternate_and_a_slot_that_is_being_read_is_not_overwritten(tmp_path: Path) -> None:
    with tiny_engine("cpu", "deepspeed=zero1") as (engine, _), snapshots(tmp_path) as (taking, folder):
        steps: list[list[int]] = []
        train(engine, 1)
        for step, busy in [(1, None), (2, None), (3, None), (4, 0), (5, 0), (6, None)]:
            take(taking, engine, step, busy)
            steps.append([folder.step_in(number) or 0 for number in range(memory.SLOTS)])
    assert steps == [[1, 0], [1, 2], [3, 2], [3, 4], [3, 5], [6, 5]]


def test_optimizer_states_created_after_preparation_are_saved(tmp_path: Path) -> None:
    """Before the first step an optimizer has no states, so the files prepared for the slots are too small."""
    with tiny_engine("cpu", "deepspeed=zero1") as (engine, _), snapshots(tmp_path) as (taking, folder):
        taking.prepare(engine)
        take(taking, engine, 1)
        assert StateReader(folder.slot(0)).state_keys == set()
        train(engine, 1)
        for step in (2, 3):
            take(taking, engine, step)
            assert StateReader(folder.snapshots()[0].path).state_keys == {"exp_avg", "exp_avg_sq"}


def test_a_fifo_in_place_of_a_small_file_is_replaced(tmp_path: Path) -> None:
    with tiny_engine("cpu", "deepspeed=zero1") as (engine, _), snapshots(tmp_path) as (taking, folder):
        os.mkfifo(folder.slot(0) / "trainer.json")
        take(taking, engine, 1)
        assert memory.why_damaged(folder.snapshots()[0], verify_checksums=True) is None


def test_an_interrupted_snapshot_leaves_the_other_slot_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_engine("cpu", "deepspeed=zero1") as (engine, _), snapshots(tmp_path) as (taking, folder):
        train(engine, 1)
        take(taking, engine, 1)
        take(taking, engine, 2)
        before = weights(folder.slot(1))
        train(engine, 1)

        def break_off(*arguments: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(SnapshotFolder, "finish", break_off)
        with pytest.raises(KeyboardInterrupt):
            take(taking, engine, 3)
        assert [snapshot.step for snapshot in folder.snapshots()] == [2]
        after = weights(folder.snapshots()[0].path)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_later_process_reuses_existing_slots(tmp_path: Path) -> None:
    with tiny_engine("cpu", "deepspeed=zero1") as (engine, _), snapshots(tmp_path) as (taking, folder):
        train(engine, 1)
        take(taking, engine, 1)
        taking.close()
        again = Snapshots(folder, tmp_path, World(), torch.device("cpu"))
        before = weights(folder.slot(0))
        again.prepare(engine)
        train(engine, 1)
        take(again, engine, 2)
        assert [snapshot.step for snapshot in folder.snapshots()] == [2, 1]
        after = weights(folder.slot(0))
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_memory_is_required_only_for_slots_that_do_not_exist_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_engine("cpu", "deepspeed=zero1") as (engine, _), snapshots(tmp_path) as (taking, folder):
        train(engine, 1)
        assert why_not_in_memory(engine, World(), folder) is None
        monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
        reason = why_not_in_memory(engine, World(), folder)
        assert reason and reason.startswith("2 snapshots need") and "50% of the available memory is 0.00 GB" in reason
        for step in (1, 2):
            take(taking, engine, step)
        assert why_not_in_memory(engine, World(), folder) is None


def test_a_missing_rank_file_is_detected(tmp_path: Path) -> None:
    """In a run on several nodes, each node has only the files of its own ranks."""
    with tiny_engine("cpu", "deepspeed=zero1") as (engine, _), snapshots(tmp_path) as (taking, folder):
        train(engine, 1)
        take(taking, engine, 1)
        files = memory.files_of(folder.snapshots()[0])
        assert has_needed_files(engine, folder.slot(0), files)
        assert not has_needed_files(engine, folder.slot(0), files.keys() - {STATE_FILE})  # of an earlier step
        (folder.slot(0) / STATE_FILE).unlink()
        assert not has_needed_files(engine, folder.slot(0), files)


def test_other_users_have_no_access_to_snapshots(tmp_path: Path) -> None:
    with snapshots(tmp_path) as (_, folder):
        assert folder.path.stat().st_mode & 0o077 == 0


@contextmanager
def two_snapshots(
    run_dir: Path, said: list[str], lock_id: list[int] | None = None
) -> Iterator[tuple[Any, CheckpointManager, SnapshotFolder]]:
    """Yield an engine, its manager and the snapshots of steps 1 and 2."""
    with tiny_engine("cpu", "deepspeed=zero1") as (engine, (run, _)):
        locked = RunFolder(run_dir, lock_id)
        manager = CheckpointManager(locked, run.checkpoint, World(), torch.device("cpu"), said.append)
        try:
            manager.begin_lineage(resumes_from_memory=False)
            train(engine, 1)
            manager.prepare(engine)
            for step in (1, 2):
                manager.save(engine, step, {}, {"position": 7}, to_disk=False)
            folder = memory.snapshot_folder(RunFolder(run_dir))
            assert folder
            yield engine, manager, folder
        finally:
            manager.close(keeps_memory=False)


def step_found(engine: Any, manager: CheckpointManager) -> int | None:
    found = manager.newest_in_memory(engine)
    return found.step if found else None


def test_a_flipped_bit_is_reported_and_the_older_snapshot_is_used(tmp_path: Path) -> None:
    said: list[str] = []
    with two_snapshots(tmp_path, said) as (engine, manager, folder):
        assert step_found(engine, manager) == 2 and said == []
        names = [STATE_FILE, "state/index.json", "trainer.json", "data_state.json", "rng_rank_0000.pt"]
        assert sorted(names) == sorted(memory.files_of(folder.snapshots()[0]))
        for name in names:
            file = folder.snapshots()[0].path / name
            intact = file.read_bytes()
            for place in (0, len(intact) // 2, len(intact) - 1):
                file.write_bytes(intact[:place] + bytes([intact[place] ^ 16]) + intact[place + 1 :])
                assert step_found(engine, manager) == 1
                assert said.pop() == f"checkpoint step_00000002 in memory skipped: {name} does not match its checksum"
            file.write_bytes(intact[:-1])
            assert step_found(engine, manager) == 1 and f"bytes instead of {len(intact)}" in said.pop()
            file.unlink()
            assert step_found(engine, manager) == 1 and f"{name} is missing" in said.pop()
            file.write_bytes(intact)
        assert step_found(engine, manager) == 2 and said == []
        for snapshot in folder.snapshots():
            (snapshot.path / "trainer.json").write_text("{}")
        assert step_found(engine, manager) is None and len(said) == 2


def test_snapshots_are_locked_while_a_run_uses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "REMOVE_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(manager_module, "LOCK_PATIENCE_SECONDS", 0.0)
    said: list[str] = []
    with two_snapshots(tmp_path, said) as (engine, manager, folder):
        memory.remove_snapshots(RunFolder(tmp_path))
        assert [snapshot.step for snapshot in folder.snapshots()] == [2, 1]
        section = load_run_config(None, []).checkpoint
        second = CheckpointManager(RunFolder(tmp_path), section, World(), torch.device("cpu"), said.append)
        assert second.newest_in_memory(engine) is None
        assert said == ["snapshots in memory skipped: another process holds their lock"]
        manager.close(keeps_memory=True)  # as at the end of its process
        found = second.newest_in_memory(engine)
        assert found and found.step == 2 and folder.lock() is None
        second.close(keeps_memory=False)
    assert not folder.path.exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_are_those_of_the_tensors_at_any_alignment(dtype: torch.dtype, tmp_path: Path) -> None:
    lengths = (1, 5, 2, 0, 3, 1000, 7, 8)
    entries = [Entry("weight", str(number), 0, length, dtype) for number, length in enumerate(lengths)]
    entries.append(Entry("weight", "other", 0, 3, torch.int16))
    flat = torch.randn(1 + sum(lengths), dtype=torch.float64).to(dtype)
    tensors = [*flat[1:].split(list(lengths)), torch.tensor([1, -2, 3], dtype=torch.int16)]
    file = MappedStateFile(tmp_path / "file", entries, torch.device("cpu"))
    entry = file.fill(tensors)
    with (tmp_path / "expected").open("wb") as expected:
        write_tensors(entries, tensors, expected)
    assert (tmp_path / "file").read_bytes() == (tmp_path / "expected").read_bytes()
    assert why_files_damaged(tmp_path, {"expected": entry}) is None
    file._bytes[-7] ^= 1
    assert why_files_damaged(tmp_path, {"file": entry}) == "file does not match its checksum"


def test_a_state_file_deleted_meanwhile_is_created_again(tmp_path: Path) -> None:
    with tiny_engine("cpu", "deepspeed=zero1") as (engine, _), snapshots(tmp_path) as (taking, folder):
        train(engine, 1)
        take(taking, engine, 1)
        (folder.slot(0) / STATE_FILE).unlink()
        for step in (2, 3):
            take(taking, engine, step)
        assert [snapshot.step for snapshot in folder.snapshots()] == [3, 2]
        assert all(memory.why_damaged(snapshot, True) is None for snapshot in folder.snapshots())


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_lost_folder_costs_a_line_and_a_save_to_disk(is_taken: bool, tmp_path: Path) -> None:
    """Also if something else has its name now."""
    said: list[str] = []
    with two_snapshots(tmp_path, said) as (engine, manager, folder), ExitStack() as stack:
        shutil.rmtree(folder.path)
        if is_taken:
            folder.path.symlink_to(tmp_path)
            stack.callback(folder.path.unlink)
        assert manager.save(engine, 3, {}, {"position": 7}, to_disk=False)
        (line,) = said
        assert line.startswith("snapshot of step 3: rank 0: ") and "it is written to disk instead" in line
        found, _ = find_latest(RunFolder(tmp_path).checkpoints)
        assert found and found.step == 3
        manager.prepare(engine)
        manager.save(engine, 4, {}, {"position": 7}, to_disk=False)
        assert step_found(engine, manager) == 4 and len(said) == 1
        now = memory.snapshot_folder(RunFolder(tmp_path))
        assert now and now != folder and memory.all_snapshot_folders()[now] == tmp_path
    assert not now.path.exists()


@pytest.mark.parametrize("to_disk", [False, True])
def test_a_run_whose_folder_was_moved_saves_nothing_in_the_folder_of_another_job(to_disk: bool, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    with ExitStack() as stack:
        lock = run.acquire_lock()
        stack.callback(os.close, lock)
        engine, manager, _ = stack.enter_context(two_snapshots(run.root, [], file_id(lock)))
        run.root.rename(tmp_path / "old")
        stack.callback(os.close, run.acquire_lock())  # of another job
        with pytest.raises(CheckpointError, match="was moved or deleted while it was in use"):
            manager.save(engine, 3, {}, {"position": 7}, to_disk)
        assert [path.name for path in run.root.iterdir()] == [".lock"]


class FailingWriter:
    """Takes the place of the writer process; the disk fails, or the snapshot is lost before it is written."""

    def __init__(self, loses_snapshots: bool) -> None:
        self._loses_snapshots = loses_snapshots
        self._is_busy = False
        self.steps: list[int] = []

    def submit(self, job: Job, slot: Path, files: dict[str, Any]) -> None:
        self._is_busy = True
        self.steps.append(job.step)
        if self._loses_snapshots:
            (slot / STATE_FILE).unlink()

    def answer(self) -> Answer | None:
        was_busy, self._is_busy = self._is_busy, False
        return Answer("why") if was_busy else None

    def abandon(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("loses_snapshots", [False, True])
def test_after_a_lost_snapshot_the_next_save_goes_to_disk(
    loses_snapshots: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with two_snapshots(tmp_path, said) as (engine, manager, _):
        writer = FailingWriter(loses_snapshots)
        monkeypatch.setattr(manager, "_writer", writer)
        for step, to_disk in [(3, True), (4, False), (5, False)]:
            manager.save(engine, step, {}, {"position": 7}, to_disk)
            manager.completed_saves()
        assert writer.steps == ([3, 4, 5] if loses_snapshots else [3])
        then = (
            "is lost, and the next save goes to disk"
            if loses_snapshots
            else "stays in memory, and the next save tries again"
        )
        assert said == [f"checkpoint of step {step} could not be written (why); it {then}" for step in writer.steps]


def test_a_start_frees_snapshots_of_a_run_whose_folder_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path / "memory")
    for path in (memory.SHARED_MEMORY, tmp_path / "run", tmp_path / "gone"):
        path.mkdir()
    abandoned = SnapshotFolder("1")
    abandoned.create(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    size, said = human_bytes(abandoned.size_bytes), list[str]()
    with two_snapshots(tmp_path / "run", said):
        assert said == [f"{size} of memory freed: snapshots of runs whose folder was moved or deleted"]
    assert not abandoned.path.exists()
