"""Deletion of checkpoints: the manifest first, and never while a process holds them."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.making import make, names, seal, write_temporary
from tests.helpers.processes import ended, has_open
from tests.helpers.small_disk import read_only
from z2all_ds.base import run_folder
from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint import layout, retention
from z2all_ds.checkpoint.layout import Checkpoint, find_latest, remove_leftovers
from z2all_ds.checkpoint.pruning import prune_run
from z2all_ds.checkpoint.retention import Retention, held, prune, remove

LAST_TWO = Retention(keep_last=2)


def test_a_partly_deleted_folder_is_not_a_checkpoint(tmp_path: Path) -> None:
    """The next start removes the rest of the folder."""
    older, _ = make(tmp_path, 1, 2)
    with read_only(older / "state"):
        assert remove(older)
        assert names(older) == ["state"]
        assert find_latest(tmp_path)[0] == Checkpoint(tmp_path / "step_00000002", 2)
    assert remove_leftovers(tmp_path) == ["step_00000001"]
    assert names(tmp_path) == ["step_00000002"]


def test_a_deletion_that_the_file_system_refuses_does_not_fail_the_run(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3)
    with read_only(tmp_path):
        assert prune(tmp_path, LAST_TWO, 3) == []
    assert [layout.why_damaged(path, verify_checksums=True) for path in layout.step_folders(tmp_path)] == [None] * 3
    assert prune(tmp_path, LAST_TWO, 3) == ["step_00000001"]


PRUNE = """
import sys
from pathlib import Path
from z2all_ds.checkpoint.pruning import prune_run
from z2all_ds.checkpoint.retention import Retention, prune

print(prune(Path(sys.argv[1]), Retention(keep_last=2), 3))
"""


@pytest.mark.skipif(not shutil.which("setpriv"), reason="there is no setpriv command to run without root's rights")
def test_an_inaccessible_checkpoint_folder_does_not_fail_the_run(tmp_path: Path) -> None:
    oldest, *_ = make(tmp_path, 1, 2, 3)
    oldest.chmod(0)
    as_anybody = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    command = [*as_anybody, sys.executable, "-c", PRUNE, str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert (answer.stdout, answer.stderr) == ("[]\n", "")
    oldest.chmod(0o755)
    assert prune(tmp_path, LAST_TWO, 3) == [oldest.name]


REMOVE = """
import sys
from pathlib import Path
from z2all_ds.checkpoint.retention import remove

remove(Path(sys.argv[1]))
"""


def test_a_killed_deletion_has_removed_the_manifest_first(tmp_path: Path) -> None:
    many = 20_000
    for step in range(1, 6):
        (path,) = make(tmp_path, step)
        for number in range(many):  # so that the manifest is one of many files
            (path / f"rng_rank_{number:05d}.pt").touch()
        with ended(subprocess.Popen([sys.executable, "-c", REMOVE, str(path)], text=True)) as process:
            while path.exists() and len(os.listdir(path)) >= many:
                assert process.poll() is None or not path.exists()
            process.send_signal(signal.SIGKILL)
            process.wait()
        if path.exists():
            assert not (path / layout.MANIFEST).exists()
            assert find_latest(tmp_path)[0] is None
            assert remove_leftovers(tmp_path) == [path.name]
            return
    pytest.fail("five deletions were each over before the kill")


@pytest.mark.parametrize("name", ["notes.md", "mine/notes.md", "state/notes/a"])
def test_a_checkpoint_with_files_of_the_user_is_left_alone(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    oldest, second, *_ = make(tmp_path, 1, 2, 3, 4)
    (oldest / name).parent.mkdir(exist_ok=True)
    (oldest / name).write_text("precious")
    assert prune(tmp_path, LAST_TWO, 4) == [second.name]
    assert prune(tmp_path, LAST_TWO, 4) == []
    assert (oldest / name).read_text() == "precious" and (oldest / layout.MANIFEST).exists()
    entry = name.removesuffix("/notes.md").removesuffix("/a")
    line = f"checkpoint {oldest}: not deleted: {entry} is not part of it. Move it elsewhere.\n"
    assert capsys.readouterr().err == line


def test_prune_reports_the_file_that_keeps_a_checkpoint(tmp_path: Path) -> None:
    oldest, *_ = make(tmp_path / "checkpoints", 1, 2, 3)
    (oldest / "notes.md").write_text("precious")
    for dry_run in (True, False):
        first, *_ = prune_run(tmp_path, dry_run, keep_last=2).checkpoints
        assert (first.stays, first.reasons) == (True, ("notes.md is not part of it",))
    assert (oldest / "notes.md").exists()


def test_removing_a_missing_checkpoint_returns_false(tmp_path: Path) -> None:
    (path,) = make(tmp_path, 1)
    assert not remove(tmp_path / "step_00000007")
    assert remove(path)
    assert not remove(path)


HOLD = """
import sys, time
from pathlib import Path
from z2all_ds.checkpoint.retention import held

with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def start_holder(path: Path) -> "subprocess.Popen[str]":
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_held_checkpoint_is_kept_until_it_is_released(tmp_path: Path) -> None:
    oldest, second, *_ = make(tmp_path, 1, 2, 3, 4)
    with ended(start_holder(oldest)) as one, ended(start_holder(oldest)) as other:  # several readers may hold it
        assert prune(tmp_path, LAST_TWO, 4) == [second.name]
        assert layout.why_damaged(oldest, verify_checksums=True) is None
        assert one.stdin
        one.stdin.close()
        assert one.wait(20) == 0
        assert prune(tmp_path, LAST_TWO, 4) == []
        other.send_signal(signal.SIGKILL)  # a dead reader releases it too
        other.wait()
    assert prune(tmp_path, LAST_TWO, 4) == [oldest.name]


def test_the_flock_command_holds_a_checkpoint_during_a_copy(tmp_path: Path) -> None:
    oldest, *_ = make(tmp_path, 1, 2, 3)
    copying = f"flock --shared {oldest / layout.MANIFEST} sh -c 'echo held; cat'"
    process = subprocess.Popen(["sh", "-c", copying], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with ended(process):
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "held\n"
        assert prune(tmp_path, LAST_TWO, 3) == []
        process.stdin.close()
        assert process.wait(20) == 0
    assert prune(tmp_path, LAST_TWO, 3) == [oldest.name]


def test_holding_a_deleted_checkpoint_is_refused(tmp_path: Path) -> None:
    (path,) = make(tmp_path, 1)
    remove(path)
    with pytest.raises(CheckpointError) as caught, held(path):
        pytest.fail("held what is not there")
    assert str(caught.value) == f"checkpoint {path}: has been deleted, or was never finished. Use a newer one."


def test_a_reader_that_waits_during_the_deletion_is_refused(tmp_path: Path) -> None:
    (path,) = make(tmp_path, 1)
    manifest = path / layout.MANIFEST
    with manifest.open("r+") as deleting:
        fcntl.flock(deleting, fcntl.LOCK_EX)
        command = [sys.executable, "-c", HOLD, str(path)]
        late = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with ended(late):
            assert late.stderr
            while not has_open(late.pid, manifest):
                assert late.poll() is None
            manifest.unlink()
            fcntl.flock(deleting, fcntl.LOCK_UN)
            assert "has been deleted" in late.stderr.read()
            late.stderr.close()


def test_a_reader_does_not_wait_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_folder, "SILENT_SECONDS", 0.01)
    monkeypatch.setattr(retention, "HOLD_PATIENCE_SECONDS", 0.02)
    (path,) = make(tmp_path, 1)
    with (path / layout.MANIFEST).open() as of_another:
        fcntl.flock(of_another, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError) as caught, held(path):
            pytest.fail("held what is locked")
    what = "another process holds the lock of its MANIFEST.json. End that process, or use another one."
    assert str(caught.value) == f"checkpoint {path}: {what}"
    assert capsys.readouterr().err == f"checkpoint {path} is locked by another process: waiting up to 0 s\n"
    assert remove(path)


def test_errors_of_the_reader_are_raised_and_release_the_checkpoint(tmp_path: Path) -> None:
    (path,) = make(tmp_path, 1)
    with pytest.raises(FileNotFoundError, match="missing_part"), held(path):
        (path / "missing_part").read_bytes()
    with pytest.raises(ZeroDivisionError), held(path):
        raise ZeroDivisionError
    assert remove(path)  # the checkpoint is no longer held


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_file_locks_a_checkpoint_is_not_held(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS server without a lock service is simulated: reading works, but does not prevent deletion."""
    (path,) = make(tmp_path, 1)

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with held(path):
        assert json.loads((path / layout.MANIFEST).read_text())["step"] == 1
        assert remove(path)
    assert not path.exists()


def test_a_step_saved_again_is_not_held_by_readers_of_the_old_one(tmp_path: Path) -> None:
    """A reader of the old folder does not keep the new one of the same name."""
    (path,) = make(tmp_path, 1)
    with held(path):
        write_temporary(tmp_path, 1)
        shutil.rmtree(path)
        seal(tmp_path, 1)
        assert remove(path)
