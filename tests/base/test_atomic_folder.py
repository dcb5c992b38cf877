"""Tests for atomic folders: a folder appears complete or not at all."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.command import environment
from tests.helpers.processes import ended
from z2all_ds.base.atomic_folder import MARK, atomic_folder
from z2all_ds.base.errors import ConfigError

SLEEPER = """
import sys, time
from pathlib import Path
from z2all_ds.base.atomic_folder import atomic_folder

with atomic_folder(Path(sys.argv[1])) as folder:
    (folder / "half").touch()
    print(folder, flush=True)
    time.sleep(60)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_appears_at_the_end_and_is_readable(tmp_path: Path) -> None:
    out = tmp_path / "new" / "model"
    with atomic_folder(out) as folder:
        (folder / "file").write_text("new")
        assert not out.exists()
        assert folder.parent == out.parent
    assert names(out.parent) == ["model"]
    assert names(out) == ["file"]
    assert out.stat().st_mode & 0o777 == 0o755


def test_the_folder_replaces_a_filled_one_only_if_asked_to(tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / "old").touch()
    with pytest.raises(OSError, match="not empty"), atomic_folder(out) as folder:
        (folder / "new").touch()
    assert names(out) == ["old"]
    with atomic_folder(out, replaces=accept) as folder:
        (folder / "new").touch()
        assert names(out) == ["old"]
    assert names(tmp_path) == ["model"]
    assert names(out) == ["new"]


def test_what_appears_meanwhile_is_checked_before_it_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "model"

    def refuse(found: Path) -> None:
        raise ConfigError(f"{found}", f"has {names(found)}", "Use a new folder.")

    def fill() -> None:
        with atomic_folder(out, replaces=refuse):
            out.mkdir()
            (out / "notes.md").touch()

    with pytest.raises(ConfigError, match=r"has \['notes.md'\]"):
        fill()
    assert (names(tmp_path), names(out)) == (["model"], ["notes.md"])


def accept(found: Path) -> None: ...


def fill_and_fail(out: Path, error: type[BaseException]) -> None:
    with atomic_folder(out, replaces=accept) as folder:
        (folder / "new").touch()
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_deletes_the_new_folder_and_keeps_the_earlier_one(error: type[BaseException], tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / "old").touch()
    with pytest.raises(error):
        fill_and_fail(out, error)
    assert names(tmp_path) == ["model"]
    assert names(out) == ["old"]


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Path]:
    """Yield the temporary folder of a killed process."""
    command = [sys.executable, "-c", SLEEPER, str(tmp_path / "model")]
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())) as process:
        assert process.stdout
        left = Path(process.stdout.readline().strip())
        with atomic_folder(tmp_path / "other"):  # the folder of a running process is not deleted
            assert names(left) == [MARK, "half"]
        process.send_signal(signal.SIGKILL)
        process.wait()
        yield left


def test_the_next_call_deletes_leftovers_of_a_killed_one(killed: Path, tmp_path: Path) -> None:
    assert killed.exists()
    foreign = tmp_path / f"{killed.name}.not.unfinished"
    for folder in (foreign, tmp_path / ".z2all_notes.replaced"):
        folder.mkdir()
    with atomic_folder(tmp_path / "third"):
        assert not killed.exists()
    assert names(tmp_path) == [*sorted([foreign.name, ".z2all_notes.replaced"]), "other", "third"]


def can_be_locked(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def test_no_lock_is_left(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "model"):
        pass
    for folder in (tmp_path, tmp_path / "model"):
        assert can_be_locked(folder), folder


def test_a_path_where_no_folder_can_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be created"), atomic_folder(tmp_path / "file" / "model"):
        pass
