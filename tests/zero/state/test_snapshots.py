"""Tests of snapshots of real engines: they equal checkpoints bit for bit, and a complete one always exists."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoints import read_whole
from tests.zero.engines import tiny_engine, train
from tests.zero.state.states import assert_same_state
from z2all_ds.base.world import World
from z2all_ds.checkpoint import memory
from z2all_ds.checkpoint.memory import SnapshotFolder
from z2all_ds.checkpoint.retention import Retention
from z2all_ds.checkpoint.state_files import StateReader
from z2all_ds.zero.state.engine_state import has_needed_files
from z2all_ds.zero.state.save import plan_save, restore, save_checkpoint
from z2all_ds.zero.state.snapshots import Snapshots, why_not_in_memory


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
        assert has_needed_files(engine, folder.slot(0))
        (folder.slot(0) / "state" / "rank_00000.safetensors").unlink()
        assert not has_needed_files(engine, folder.slot(0))


def test_other_users_have_no_access_to_snapshots(tmp_path: Path) -> None:
    with snapshots(tmp_path) as (_, folder):
        assert folder.path.stat().st_mode & 0o077 == 0
