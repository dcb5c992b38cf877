"""Disks that fill up or become read-only during a save, on real small file systems.

The previous checkpoint stays complete and is found, the error is one line, and the next start removes and lists the
leftovers of the failed save.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.making import make, names, seal, write_temporary
from tests.helpers.small_disk import fill, free_bytes, read_only, small_disk
from tests.zero.engines import tiny_engine, train
from tests.zero.state.states import assert_same_state
from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint.disk_file import write_file
from z2all_ds.checkpoint.layout import Checkpoint, find_latest, open_checkpoint, remove_leftovers
from z2all_ds.checkpoint.retention import Retention, held, prune
from z2all_ds.checkpoint.state_files import Entry, write_tensors
from z2all_ds.zero.state.save import save_checkpoint

MIB = 1 << 20
PAGE = 4096
LAST_TWO = Retention(keep_last=2)


# Files without an engine


def test_a_disk_that_fills_up_during_the_state_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2 * MIB) as disk:
        (first,) = make(disk, 1)
        temporary = write_temporary(disk, 2)
        entries = [Entry("weight", f"layer_{number}", 0, MIB // 16, torch.float32) for number in range(16)]
        tensors = (torch.ones(one.length) for one in entries)
        with pytest.raises(OSError, match="No space left on device"):
            write_file(temporary / "state" / "rank_00002.safetensors", partial(write_tensors, entries, tensors))
        assert free_bytes(disk) < PAGE
        assert find_latest(disk) == (Checkpoint(first, 1), [])
        assert remove_leftovers(disk) == [".tmp_step_00000002"]
        assert names(disk) == [first.name]
        make(disk, 2)  # there is space again
        assert find_latest(disk)[0] == Checkpoint(disk / "step_00000002", 2)


def test_a_disk_that_is_full_before_the_manifest_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2 * MIB) as disk:
        (first,) = make(disk, 1)
        write_temporary(disk, 2)
        filler = fill(disk)
        with pytest.raises(OSError, match="No space left on device"):
            seal(disk, 2)
        line = "checkpoint step_00000002 skipped: no MANIFEST.json: it was never finished"
        assert find_latest(disk) == (Checkpoint(first, 1), [line])
        assert remove_leftovers(disk) == ["step_00000002"]
        filler.unlink()
        make(disk, 2)
        assert find_latest(disk) == (Checkpoint(disk / "step_00000002", 2), [])


def test_checkpoints_can_be_deleted_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2 * MIB) as disk:
        make(disk, 1, 2, 3)
        fill(disk)
        assert prune(disk, LAST_TWO, 3) == ["step_00000001"]
        assert free_bytes(disk) >= 3 * PAGE


def test_a_read_only_folder_can_be_read_and_is_not_changed(tmp_path: Path) -> None:
    first, second = make(tmp_path, 1, 2)
    write_temporary(tmp_path, 3)
    with read_only(tmp_path):
        with pytest.raises(OSError, match="Read-only file system"):
            seal(tmp_path, 3)
        assert find_latest(tmp_path) == (Checkpoint(second, 2), [])
        with held(first):
            assert open_checkpoint(first) == Checkpoint(first, 1)
        remove_leftovers(tmp_path)  # removes nothing and does not raise
        assert names(tmp_path) == [".tmp_step_00000003", first.name, second.name]
    assert remove_leftovers(tmp_path) == [".tmp_step_00000003"]
    assert names(tmp_path) == [first.name, second.name]


# A complete save of an engine


def save(engine: Any, folder: Path, step: int) -> Path:
    return save_checkpoint(engine, folder, step, {"note": "x" * 3 * PAGE}, {"position": 8 * step}, LAST_TWO)


def test_a_save_that_runs_out_of_space_anywhere_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    with tiny_engine("cpu", "deepspeed=zero1") as (engine, _), small_disk(tmp_path / "disk", 4 * MIB) as disk:
        train(engine, 1)
        before = free_bytes(disk)
        first = save(engine, disk, 1)
        needed = before - free_bytes(disk)
        train(engine, 1)
        state_only = first / "state" / "rank_00000.safetensors"
        amounts = [0, PAGE, state_only.stat().st_size // 2, *(needed - pages * PAGE for pages in range(10, 0, -1))]
        remains = []
        for leave_bytes in amounts:
            filler = fill(disk, leave_bytes)
            with pytest.raises(CheckpointError) as caught:
                save(engine, disk, 2)
            filler.unlink()
            assert str(caught.value).startswith("checkpoint of step 2: could not be written (rank 0: ")
            assert str(caught.value).endswith(
                f"Free space in {disk} and run the same command: it resumes from the newest complete checkpoint."
            )
            assert find_latest(disk)[0] == Checkpoint(first, 1), leave_bytes
            remains.append(remove_leftovers(disk))
            assert names(disk) == [first.name]
        # The last attempt had space for everything but the manifest; the attempts before leave nothing.
        assert remains == [[]] * (len(amounts) - 1) + [["step_00000002"]]
        # The engine is unchanged, and exactly the needed space suffices.
        fill(disk, needed)
        assert_same_state(save(engine, disk, 2), save(engine, tmp_path / "elsewhere", 2))
        assert find_latest(disk)[0] == Checkpoint(disk / "step_00000002", 2)
        assert json.loads((first / "trainer.json").read_text())["step"] == 1


def test_a_save_into_a_read_only_folder_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    with tiny_engine("cpu", "deepspeed=zero1") as (engine, _):
        train(engine, 1)
        first = save(engine, tmp_path, 1)
        train(engine, 1)
        with read_only(tmp_path), pytest.raises(CheckpointError, match="Read-only file system"):
            save(engine, tmp_path, 2)
        assert names(tmp_path) == [first.name]
        assert find_latest(tmp_path) == (Checkpoint(first, 1), [])
        assert save(engine, tmp_path, 2) == tmp_path / "step_00000002"
