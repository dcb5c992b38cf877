"""Snapshot slots in shared memory: only complete ones count, and other lineages are never read."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.checkpoint.making import make
from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import memory
from z2all_ds.checkpoint.disk_file import text, write_file
from z2all_ds.checkpoint.layout import REQUIRED, Checkpoint
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
    folder.finish(0, 10, {})
    folder.finish(1, 12, {})
    assert [(snapshot.step, snapshot.path) for snapshot in folder.snapshots()] == [
        (12, folder.slot(1)),
        (10, folder.slot(0)),
    ]
    assert folder.snapshots()[0].name == "step_00000012 in memory"
    folder.begin(1)
    assert [snapshot.step for snapshot in folder.snapshots()] == [10]


@pytest.mark.parametrize("content", ["", "12", "[]", "{}", '{"step": "12", "files": {}}', '{"step": 12, "files": 1}'])
def test_an_unreadable_slot_is_not_a_snapshot(content: str, folder: SnapshotFolder) -> None:
    (folder.slot(0) / "READY_00000").write_text(content)
    assert folder.step_in(0) is None


@pytest.mark.parametrize("name", ["READY_00000", ".READY_00000"])
def test_a_fifo_in_place_of_the_list_of_files_is_replaced(name: str, folder: SnapshotFolder) -> None:
    os.mkfifo(folder.slot(0) / name)
    assert folder.step_in(0) is None  # and does not wait for a writer
    folder.finish(0, 12, {})
    assert folder.step_in(0) == 12


def test_a_fifo_in_place_of_the_path_of_the_run_is_replaced(folder: SnapshotFolder, tmp_path: Path) -> None:
    (folder.path / "run_dir").unlink()
    os.mkfifo(folder.path / "run_dir")
    assert folder not in memory.all_snapshot_folders()
    folder.create(tmp_path)
    assert memory.all_snapshot_folders()[folder] == tmp_path


def take(folder: SnapshotFolder, number: int, step: int, first_rank: int = 0, ranks: int = 1) -> Checkpoint:
    """Write a small snapshot with the files that each must have."""
    of_ranks = range(first_rank, first_rank + ranks)
    names = [*REQUIRED, *(f"state/rank_{rank:05d}.safetensors" for rank in of_ranks)]
    names += [f"rng_rank_{rank:04d}.pt" for rank in of_ranks]
    content = text(json.dumps({"step": step}))
    files = {name: write_file(folder.slot(number) / name, content) for name in names}
    folder.finish(number, step, files, first_rank, ranks)
    return folder.snapshots()[0]


def test_damage_of_a_snapshot_is_detected(folder: SnapshotFolder) -> None:
    snapshot = take(folder, 0, 12)
    assert memory.why_damaged(snapshot, verify_checksums=True) is None
    (snapshot.path / "data_state.json").write_text('{"step": 13}')
    assert memory.why_damaged(snapshot, verify_checksums=True) == "data_state.json does not match its checksum"
    # The ranks of a node divide the files: data_state.json is the first, trainer.json the last.
    assert [bool(memory.why_damaged(snapshot, True, part, 3)) for part in range(3)] == [True, False, False]
    assert memory.why_damaged(snapshot, verify_checksums=False) is None
    (snapshot.path / "data_state.json").unlink()
    assert memory.why_damaged(snapshot, verify_checksums=False) == "data_state.json is missing"


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ('"step": 12', '"step": 13', "trainer.json is of step 12"),
        ('"trainer.json"', '"trainez.json"', "READY does not list trainer.json"),
        ("state/rank_00000", "state/rank_00008", "READY does not list state/rank_00000.safetensors"),
        ("rng_rank_0000", "rng_rank_0008", "READY does not list rng_rank_0000.pt"),
        ('"ranks": [0]', '"ranks": ["0"]', "READY is not readable (ValueError)"),
        ('"checksum"', '"checksul"', "READY is not readable (KeyError)"),
        ('"bytes"', '"bytez"', "READY is not readable (KeyError)"),
    ],
)
def test_damage_of_the_list_of_files_is_detected(before: str, after: str, problem: str, folder: SnapshotFolder) -> None:
    ready = take(folder, 0, 12).path / "READY_00000"
    ready.write_text(ready.read_text().replace(before, after))
    assert memory.why_damaged(folder.snapshots()[0], verify_checksums=True) == problem


def test_the_files_of_each_rank_of_the_node_must_be_listed(folder: SnapshotFolder) -> None:
    snapshot = take(folder, 0, 12, first_rank=8, ranks=2)
    assert memory.why_damaged(snapshot, verify_checksums=True) is None
    ready = snapshot.path / "READY_00008"
    for name in ("state/rank_00009.safetensors", "rng_rank_0009.pt"):
        content = json.loads(ready.read_text())
        del content["files"][name]
        ready.write_text(json.dumps(content))
        assert memory.why_damaged(snapshot, verify_checksums=False) == f"READY does not list {name}"
        take(folder, 0, 12, first_rank=8, ranks=2)


def test_containers_of_one_host_may_share_a_folder(folder: SnapshotFolder) -> None:
    for first_rank in (0, 8):
        folder.finish(0, 12, {f"state/rank_{first_rank:05d}.safetensors": {}}, first_rank)
    (snapshot,) = folder.snapshots()
    assert sorted(memory.files_of(snapshot)) == ["state/rank_00000.safetensors", "state/rank_00008.safetensors"]
    folder.finish(0, 14, {}, 8)  # the run was killed before the other did the same
    assert folder.snapshots() == []
    folder.begin(0)
    folder.finish(0, 14, {}, 8)
    assert [snapshot.step for snapshot in folder.snapshots()] == [14]


def test_a_locked_folder_is_not_removed(folder: SnapshotFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "REMOVE_PATIENCE_SECONDS", 0.0)
    assert not folder.is_in_use
    lock = folder.lock()
    assert lock is not None and folder.lock() is None and folder.is_in_use
    folder.remove()
    memory.remove_snapshots(RunFolder(memory.all_snapshot_folders()[folder]))
    assert folder.path.exists()
    of_another_node = folder.lock(first_rank=8)
    assert of_another_node is not None
    os.close(lock)  # as at the end of the process
    folder.remove()
    assert folder.path.exists() and folder.is_in_use
    os.close(of_another_node)
    folder.remove()
    assert not folder.path.exists() and folder.lock() is None


def test_a_run_finds_and_removes_only_its_own_snapshots(folder: SnapshotFolder, tmp_path: Path) -> None:
    run, stranger = RunFolder(tmp_path), SnapshotFolder(memory.new_lineage())
    stranger.create(tmp_path / "another")
    try:
        assert memory.snapshot_folder(run) is None
        run.lineage.write_text("../somewhere")
        assert memory.snapshot_folder(run) is None
        run.lineage.unlink()
        os.mkfifo(run.lineage)
        assert memory.snapshot_folder(run) is None  # and does not wait for a writer
        memory.write_lineage(run, folder)
        assert run.lineage.stat().st_mode & 0o077 == 0
        line = memory.snapshot_folder(run)
        assert line and line.path == folder.path
        memory.remove_snapshots(run, but=line)
        assert folder.path.exists()
        memory.remove_snapshots(run)
        assert not folder.path.exists() and stranger.path.exists()
    finally:
        stranger.remove()


def test_snapshots_of_another_folder_at_the_same_path_are_left_alone(folder: SnapshotFolder, tmp_path: Path) -> None:
    """As in another container, which shares only the memory."""
    intact, run = (folder.path / "run_id").read_text(), RunFolder(tmp_path)
    (folder.path / "run_id").write_text(json.dumps([[1, 2], [1, 3]]))
    memory.remove_snapshots(run)
    assert folder.path.exists() and folder not in memory.unneeded_snapshots(run)
    (folder.path / "run_id").write_text(intact)
    assert folder in memory.unneeded_snapshots(run)
    (folder.path / "run_id").unlink()  # an earlier version
    memory.remove_snapshots(run)
    assert not folder.path.exists()


def test_a_copied_or_moved_run_folder_does_not_find_the_snapshots_of_the_original(
    folder: SnapshotFolder, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    memory.write_lineage(run, folder)
    shutil.copytree(run.root, tmp_path / "copy")
    assert memory.snapshot_folder(RunFolder(tmp_path / "copy")) is None
    assert memory.snapshot_folder(run) == folder
    run.root.rename(tmp_path / "old")
    (tmp_path / "copy").rename(run.root)
    assert memory.snapshot_folder(run) is None  # the same path, another folder


def empty(run: RunFolder) -> None:
    """Remove the files that `rm -r RUN/*` does."""
    for path in run.root.glob("[!.]*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def restore_a_backup(run: RunFolder) -> None:
    shutil.copytree(run.root, run.root.with_name("backup"))
    run.events.rename(run.root.with_name("old_events"))  # keeps its inode in use
    shutil.copytree(run.root.with_name("backup"), run.root, dirs_exist_ok=True)


def go_back(run: RunFolder) -> None:
    shutil.rmtree(run.checkpoints / "step_00000020")


@pytest.mark.parametrize("change", [empty, restore_a_backup, go_back])
def test_the_snapshots_of_a_run_whose_files_were_removed_do_not_count(
    change: Callable[[RunFolder], None], folder: SnapshotFolder, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    make(run.checkpoints, 10, 20)
    run.data_states.mkdir()
    for step in (10, 20):
        (run.data_states / f"step_{step:08d}.json").write_text("{}")
    memory.write_lineage(run, folder)
    with run.events.open("a") as events:
        events.write("{}\n")
    assert memory.snapshot_folder(run) == folder
    change(run)
    assert run.lineage.exists() and memory.snapshot_folder(run) is None
    memory.write_lineage(run, folder)
    assert (memory.snapshot_folder(run) == folder) == (change is not go_back)


@pytest.mark.parametrize(
    ("change", "at_a_start", "by_prune"),
    [
        ("none", False, False),
        ("moved", True, True),
        ("replaced", True, True),
        ("moved with its parent", False, True),
        ("another parent", False, False),  # a disk that is not mounted, or the file system of another container
        ("locked", False, False),
        ("a mount point", False, False),
        ("without identity", False, False),
        ("wrong identity", False, False),
    ],
)
def test_snapshots_of_a_run_whose_folder_is_gone_are_not_needed(
    change: str, at_a_start: bool, by_prune: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path / "memory")
    run, elsewhere, kept = tmp_path / "runs" / "run", tmp_path / "elsewhere", tmp_path / "kept"
    for path in (memory.SHARED_MEMORY, run, kept):
        path.mkdir(parents=True)
    found, other = SnapshotFolder("1"), SnapshotFolder("2")
    found.create(run)
    other.create(kept)
    with ExitStack() as stack:
        lock = found.lock()
        assert lock is not None
        if change == "locked":
            stack.callback(os.close, lock)
        else:
            os.close(lock)
        if change in ("moved with its parent", "another parent"):
            run.parent.rename(elsewhere)
        elif change != "none":
            run.rename(elsewhere)
        match change:
            case "replaced":
                run.mkdir()
            case "another parent":
                run.parent.mkdir()
            case "a mount point":
                (parent_device, parent), (_, root) = json.loads((found.path / "run_id").read_text())
                (found.path / "run_id").write_text(json.dumps([[parent_device, parent], [parent_device + 1, root]]))
            case "without identity":  # an earlier version
                (found.path / "run_id").unlink()
            case "wrong identity":
                (found.path / "run_id").write_text("[1, 2]")
        assert memory.unneeded_snapshots() == [found] * at_a_start
        pruned = RunFolder(tmp_path / "pruned")
        assert memory.unneeded_snapshots(pruned) == [found] * by_prune
    assert other in memory.unneeded_snapshots(RunFolder(kept))


@pytest.mark.parametrize("planted", ["link", "pipe", "readable", "foreign"])
def test_a_snapshot_folder_that_others_can_write_to_is_never_used(planted: str, tmp_path: Path) -> None:
    found = SnapshotFolder(memory.new_lineage())
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (target / "kept").write_text("kept")
    match planted:
        case "link":
            found.path.symlink_to(target)
        case "pipe":
            os.mkfifo(found.path)
        case "readable":
            found.path.mkdir(mode=0o777)
            found.path.chmod(0o777)
        case "foreign":
            if os.getuid():
                pytest.skip("only root can create a folder of another user")
            found.path.mkdir(mode=0o700)
            os.chown(found.path, 12345, 12345)
    try:
        assert found.snapshots() == [] and found not in memory.all_snapshot_folders()
        with pytest.raises((CheckpointError, FileExistsError)):
            found.create(tmp_path)
        found.remove()
        assert os.path.lexists(found.path) and (target / "kept").exists()
    finally:
        found.path.rmdir() if found.path.is_dir() and not found.path.is_symlink() else found.path.unlink()


def test_too_large_a_snapshot_is_refused_with_the_reason() -> None:
    assert memory.why_no_room(1000) is None
    reason = memory.why_no_room(1 << 60)
    assert reason and "/dev/shm has" in reason and "--shm-size" in reason
