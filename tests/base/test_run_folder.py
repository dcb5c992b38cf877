"""File names in a run folder, and its lock, tested with real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.processes import ended, has_open
from z2all_ds.base import run_folder
from z2all_ds.base.errors import CheckpointError, ConfigError
from z2all_ds.base.run_folder import RunFolder, file_id

HOLD = """
import sys, time
from pathlib import Path
from z2all_ds.base.run_folder import RunFolder

RunFolder(Path(sys.argv[1])).acquire_lock()
print("locked", flush=True)
time.sleep(60)
"""


def start_holder(root: Path) -> subprocess.Popen[str]:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(root)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout
    assert holder.stdout.readline() == "locked\n"
    return holder


def test_names_of_files_and_folders() -> None:
    folder = RunFolder(Path("run"))
    found = [folder.config, folder.ds_config, folder.environment, folder.metrics, folder.events]
    found += [folder.checkpoints, folder.exports, folder.plots, folder.rank_log(12)]
    assert [str(path) for path in found] == [
        "run/run.yaml",
        "run/ds_config.json",
        "run/environment.json",
        "run/metrics.jsonl",
        "run/events.jsonl",
        "run/checkpoints",
        "run/exports",
        "run/plots",
        "run/logs/rank_0012.log",
    ]


def test_a_second_job_is_refused_until_the_first_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "new" / "run"
    with ended(start_holder(root)) as holder:
        monkeypatch.setattr(run_folder, "LOCK_PATIENCE_SECONDS", 0.3)
        with pytest.raises(CheckpointError) as caught:
            RunFolder(root).acquire_lock()
        assert str(caught.value) == (
            f"run folder {root}: another job is writing to it. Stop that job or set a different run_dir."
        )
        os.close(RunFolder(tmp_path / "other").acquire_lock())  # other folders are free
        monkeypatch.setattr(run_folder, "LOCK_PATIENCE_SECONDS", 60.0)
        started = time.monotonic()
        with pytest.raises(CheckpointError, match="another job is writing to it"):
            RunFolder(root).acquire_lock(patience_seconds=0.0)
        assert time.monotonic() - started < 5
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    os.close(RunFolder(root).acquire_lock())


def test_a_job_waits_for_the_lock_of_a_job_that_is_about_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with ended(start_holder(tmp_path)) as holder:
        with ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as waiting:
            while not has_open(waiting.pid, tmp_path / ".lock"):
                assert waiting.poll() is None
                time.sleep(0.01)
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(0.5)  # it has already tried once and keeps waiting
            holder.send_signal(signal.SIGKILL)
            assert waiting.stdout
            assert waiting.stdout.readline() == "locked\n"


def test_other_users_cannot_lock_the_folder(tmp_path: Path) -> None:
    folder, names = RunFolder(tmp_path), (".lock", ".launch_lock")
    (tmp_path / ".lock").touch(mode=0o644)  # as by earlier versions
    with folder.launching():
        assert [(tmp_path / name).stat().st_mode & 0o777 for name in names] == [0o600] * 2


def test_checkpoints_that_are_those_of_another_run_are_refused(tmp_path: Path) -> None:
    other, disk = RunFolder(tmp_path / "other"), tmp_path / "disk" / "checkpoints"
    other.checkpoints.mkdir(parents=True)
    disk.mkdir(parents=True)
    for number, target in enumerate((other.checkpoints, disk)):
        run = RunFolder(tmp_path / f"run_{number}")
        run.root.mkdir()
        run.checkpoints.symlink_to(target)
        os.close(run.acquire_lock())  # plain folders: a disk of its own
    other.config.touch()
    with pytest.raises(CheckpointError, match="is a link to the checkpoints of the run"):
        RunFolder(tmp_path / "run_0").acquire_lock()


@pytest.mark.parametrize("change", ["none", "moved", "replaced", "unreachable"])
def test_a_locked_folder_that_was_moved_is_lost(change: str, tmp_path: Path) -> None:
    root = tmp_path / "parent" / "run"
    lock = RunFolder(root).acquire_lock()
    folder = RunFolder(root, file_id(lock))
    if change in ("moved", "replaced"):
        root.rename(tmp_path / "old")
    if change == "replaced":
        os.close(RunFolder(root).acquire_lock())
    if change == "unreachable":  # as by a disk with errors
        root.parent.rename(tmp_path / "old")
        root.parent.symlink_to(root.parent)
    assert folder.is_lost == (change in ("moved", "replaced"))
    assert not RunFolder(root).is_lost  # of a command that holds no lock
    os.close(lock)


def test_child_processes_do_not_inherit_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = RunFolder(tmp_path).acquire_lock()
    code = "import time; print('up', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, close_fds=False)
    with ended(child):
        assert child.stdout
        assert child.stdout.readline() == "up\n"
        os.close(handle)
        monkeypatch.setattr(run_folder, "LOCK_PATIENCE_SECONDS", 0.0)
        os.close(RunFolder(tmp_path).acquire_lock())


def put(root: Path, **files: str) -> list[Path]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return sorted(root.rglob("*"))


REPLACED = [
    *("run.yaml", "metrics.jsonl", "events.jsonl", "health.jsonl", "stop", ".lineage"),
    *("launch/run.yaml", "launch/hostfile", "launch/rank.py", "logs/launcher.log", "logs/launcher_node1.log"),
]


@pytest.mark.parametrize("name", REPLACED)
def test_a_run_does_not_take_over_a_folder_of_others(tmp_path: Path, name: str) -> None:
    """Not even if it has a `.lock`, which other programs create too, or names of a run without its content."""
    folder = RunFolder(tmp_path)
    before = put(tmp_path, **{".lock": "", "checkpoints/step_1/model.bin": "", name: '{"event": "mine"}\n'})
    refused = pytest.raises(ConfigError, match=f"has {name}, which a run would replace")
    with refused, folder.launching():
        pass
    with refused:
        folder.claim()
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / name).rename(tmp_path / "mine")
    folder.claim()
    (tmp_path / "mine").rename(tmp_path / name)
    with folder.launching():  # a run has used it
        pass


EVENT = '{"time_unix": 1.5, "event": "started", "step": 0}\n'


@pytest.mark.parametrize("files", [{"events.jsonl": EVENT}, {"checkpoints/step_00000002/MANIFEST.json": "{}"}])
def test_a_run_continues_in_a_folder_of_an_earlier_version_or_a_copy(tmp_path: Path, files: dict[str, str]) -> None:
    """A direct start of an earlier version left no `.launch_lock`; a copy may lack hidden files."""
    put(tmp_path, **{"run.yaml": "", "metrics.jsonl": "", **files})
    with RunFolder(tmp_path).launching():
        assert (tmp_path / ".lock").is_file()
