"""Snapshot slots in shared memory: only complete ones count, and other lineages are never read."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import memory
from z2all_ds.checkpoint.memory import SnapshotFolder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SnapshotFolder]:
    found = SnapshotFolder(memory.new_lineage())
    found.create(tmp_path)
    yield found
    found.remove()
    assert not found.path.exists()


def test_a_slot_is_a_snapshot_from_finish_to_the_next_begin(folder: SnapshotFolder) -> None:
    assert folder.snapshots() == [] and folder.step_in(0) is None
    folder.begin(0)
    assert folder.snapshots() == []
    folder.finish(0, 10)
    folder.finish(1, 12)
    assert [(snapshot.step, snapshot.path) for snapshot in folder.snapshots()] == [
        (12, folder.slot(1)),
        (10, folder.slot(0)),
    ]
    assert folder.snapshots()[0].name == "step_00000012 in memory"
    folder.begin(1)
    assert [snapshot.step for snapshot in folder.snapshots()] == [10]


def test_an_unreadable_slot_is_not_a_snapshot(folder: SnapshotFolder) -> None:
    (folder.slot(0) / "READY").write_text("")
    assert folder.step_in(0) is None


def test_a_run_finds_and_removes_only_its_own_snapshots(folder: SnapshotFolder, tmp_path: Path) -> None:
    run, stranger = RunFolder(tmp_path), SnapshotFolder(memory.new_lineage())
    stranger.create(tmp_path / "another")
    try:
        assert memory.snapshot_folder(run) is None
        run.lineage.write_text("../somewhere")
        assert memory.snapshot_folder(run) is None
        run.lineage.write_text(folder.lineage)
        line = memory.snapshot_folder(run)
        assert line and line.path == folder.path
        memory.remove_snapshots(run, but=line)
        assert folder.path.exists()
        memory.remove_snapshots(run)
        assert not folder.path.exists() and stranger.path.exists()
    finally:
        stranger.remove()


def test_too_large_a_snapshot_is_refused_with_the_reason() -> None:
    assert memory.why_no_room(1000) is None
    reason = memory.why_no_room(1 << 60)
    assert reason and "/dev/shm has" in reason and "--shm-size" in reason
