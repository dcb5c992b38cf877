"""Tests of the locks of op builds, with real processes that hold them or have ended."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.processes import ended
from z2all_ds.zero import build_locks

HOLD_LIKE_TORCH = """
import os, sys, time
os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)
print("held", flush=True)
time.sleep(60)
"""
INITIAL, CONTAINER = "pid:[4026531836]", "pid:[4026532000]"
BUILD_THAT_SLEEPS = "rule wait\n  command = sleep 60\nbuild out: wait\n"


def old(path: Path) -> Path:
    """Make a lock old enough to be stale even if its holder may be invisible (in a container)."""
    an_hour_ago = time.time() - 3600
    os.utime(path, (an_hour_ago, an_hour_ago))
    return path


def make_lock(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lock").touch()
    return folder / "lock"


def test_locks_without_a_holder_are_removed(tmp_path: Path) -> None:
    known = old(make_lock(tmp_path / "fused_adam"))  # killed before it has written its build.ninja
    other = old(make_lock(tmp_path / "quantizer"))
    (tmp_path / "quantizer" / "build.ninja").touch()
    (tmp_path / "fused_adam" / "fused_adam.so").touch()
    assert build_locks.remove_stale_locks(tmp_path) == [known, other]
    assert not known.exists()
    assert not other.exists()
    assert (tmp_path / "fused_adam" / "fused_adam.so").exists()
    assert build_locks.remove_stale_locks(tmp_path) == []
    assert build_locks.find_locks(tmp_path / "missing") == []


def test_files_of_other_programs_named_lock_stay(tmp_path: Path) -> None:
    folders = (tmp_path, tmp_path / "app", tmp_path / "app" / "cpu_adam")
    locks = [old(make_lock(folder)) for folder in folders]
    assert build_locks.find_locks(tmp_path) == []
    assert build_locks.remove_stale_locks(tmp_path) == []
    assert all(lock.exists() for lock in locks)


def test_a_lock_is_held_while_its_process_lives(tmp_path: Path) -> None:
    (tmp_path / "cpu_adam").mkdir()
    lock = tmp_path / "cpu_adam" / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD_LIKE_TORCH, str(lock)], stdout=subprocess.PIPE, text=True)
    with ended(holder):
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        old(lock)  # the age of a held lock does not matter
        assert [found.state for found in build_locks.find_locks(tmp_path)] == ["held"]
        assert build_locks.remove_stale_locks(tmp_path) == []
    assert build_locks.remove_stale_locks(tmp_path) == [lock]


def test_a_lock_is_held_while_an_orphaned_ninja_still_builds(tmp_path: Path) -> None:
    lock = old(make_lock(tmp_path / "cpu_adam"))
    (tmp_path / "cpu_adam" / "build.ninja").write_text(BUILD_THAT_SLEEPS)
    ninja = Path(sys.executable).parent / "ninja"
    if not ninja.exists():
        pytest.skip("ninja is not in the interpreter's own folder")
    with ended(subprocess.Popen([ninja], cwd=lock.parent, stdout=subprocess.DEVNULL, text=True)) as process:
        while Path(f"/proc/{process.pid}/comm").read_text().strip() != "ninja":
            time.sleep(0.01)
        assert [found.state for found in build_locks.find_locks(tmp_path)] == ["held"]
        process.terminate()  # on this signal ninja also ends its commands
        process.wait()
    assert build_locks.remove_stale_locks(tmp_path) == [lock]


def test_a_recent_lock_is_stale_only_if_every_holder_would_be_visible(tmp_path: Path) -> None:
    make_lock(tmp_path / "cpu_adam")
    expected = "unknown" if build_locks.holder_may_be_invisible(tmp_path) else "stale"
    assert [found.state for found in build_locks.find_locks(tmp_path)] == [expected]


@pytest.mark.parametrize(
    ("file_system", "namespace", "expected"),
    [
        ("nfs", INITIAL, True),
        ("fuseblk", INITIAL, True),
        ("ext2/ext3", INITIAL, False),
        ("ext2/ext3", CONTAINER, True),  # a volume that other containers may share
        ("overlayfs", CONTAINER, False),  # the container's own root
    ],
)
def test_holder_may_be_invisible_depends_on_file_system_and_container(
    file_system: str, namespace: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stat").write_text(f"#!/bin/sh\necho {file_system}\n")
    (tmp_path / "stat").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "readlink", lambda path: namespace)
    assert build_locks.holder_may_be_invisible(tmp_path) is expected
