"""Folders on disk, and retries after temporary errors."""

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from tests.base.storage.test_open_files import open_descriptors
from z2all_ds.base.storage import folders, open_folder, reason
from z2all_ds.base.storage.folders import try_again
from z2all_ds.base.storage.local import LocalFolder
from z2all_ds.base.storage.open_files import OPEN_FILES


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "FIRST_WAIT_SECONDS", 0.001)


def test_paths_are_local_and_urls_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_folder(tmp_path), LocalFolder)
    assert (open_folder(str(tmp_path)).is_local, open_folder("memory://x").is_local) == (True, False)
    assert open_folder(tmp_path).where("a/b") == str(tmp_path / "a/b")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_folder("~/x").location == str(tmp_path / "x")


def test_written_files_are_read_back(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    folder.write_whole("deep/er/x.bin", bytes(range(100)))
    assert folder.read("deep/er/x.bin") == bytes(range(100))
    assert folder.read_range("deep/er/x.bin", 10, 20) == bytes(range(10, 20))
    assert folder.read_range("deep/er/x.bin", 90, 200) == bytes(range(90, 100))
    found = os.stat(tmp_path / "deep/er/x.bin")
    assert folder.stamp("deep/er/x.bin") == (100, found.st_mtime_ns)
    assert (folder.exists("deep/er/x.bin"), folder.exists("deep/x.bin")) == (True, False)
    assert [path.name for path in (tmp_path / "deep/er").iterdir()] == ["x.bin"]


def test_list_files_follows_links_and_stops_at_link_cycles(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", ".hidden/h.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a/up").symlink_to(tmp_path)
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")
    assert open_folder(tmp_path).list_files() == {".hidden/h.txt": 13, "a/z.txt": 7, "b.txt": 5, "link.txt": 5}
    with pytest.raises(FileNotFoundError):
        open_folder(tmp_path / "none").list_files()


def test_a_failed_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError):
        open_folder(tmp_path).write_whole("taken", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_file_that_was_rewritten_is_read_with_its_new_content(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    folder.write_whole("x", b"old")
    assert folder.read_range("x", 0, 3) == b"old"
    folder.write_whole("x", b"new")
    assert folder.read_range("x", 0, 3) == b"new"


def test_stamp_closes_a_file_that_was_replaced_or_deleted(tmp_path: Path) -> None:
    folder, path = open_folder(tmp_path), tmp_path / "x"
    path.write_bytes(b"old")
    assert folder.read_range("x", 0, 3) == b"old"
    (tmp_path / "y").write_bytes(b"newer")
    os.replace(tmp_path / "y", path)
    assert folder.read_range("x", 0, 9) == b"old"  # still the open file, as documented in `local.py`
    assert folder.stamp("x").size == 5
    assert folder.read_range("x", 0, 9) == b"newer"
    path.unlink()
    with pytest.raises(FileNotFoundError):
        folder.stamp("x")
    with pytest.raises(FileNotFoundError):
        folder.read_range("x", 0, 9)
    assert open_descriptors(tmp_path) == []


@pytest.mark.parametrize("location", ["{}", "file://{}"])
def test_pickled_folders_read_the_same(tmp_path: Path, location: str) -> None:
    folder = open_folder(location.format(tmp_path))
    folder.write_whole("x", b"12345")
    assert folder.read_range("x", 1, 3) == b"23"
    again = pickle.loads(pickle.dumps(folder))
    assert (again.location, again.is_local, again.read_range("x", 1, 3)) == (folder.location, folder.is_local, b"23")


def test_open_file_returns_a_file_object_that_pyarrow_can_use(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10
    (tmp_path / "x").write_bytes(data)
    file = open_folder(tmp_path).open_file("x")
    assert file.seek(-10, os.SEEK_END) == len(data) - 10
    assert (file.read(4), file.tell(), file.read(), file.read(5)) == (data[-10:-6], len(data) - 6, data[-6:], b"")
    file.seek(3)
    assert (file.read(2), file.seek(1, os.SEEK_CUR), file.readall()) == (data[3:5], 6, data[6:])
    arrow = pa.PythonFile(open_folder(tmp_path).open_file("x"), mode="r")
    assert (arrow.size(), arrow.read_at(7, 500)) == (len(data), data[500:507])


# Retries


def failing(error: Exception, times: int) -> Callable[[], int]:
    """Return an action that fails `times` times and then returns the number of its calls."""
    calls = [0]

    def act() -> int:
        calls[0] += 1
        if calls[0] <= times:
            raise error
        return calls[0]

    return act


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "I/O error"),
        OSError(errno.ESTALE, "stale"),
        OSError(errno.EBUSY, "busy"),
        TimeoutError(),
        ConnectionResetError(errno.ECONNRESET, "reset"),
    ],
)
def test_temporary_errors_are_retried(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert try_again("x", failing(error, 4)) == 5
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("try ")[2][:6] for line in lines] == ["2 of 5", "3 of 5", "4 of 5", "5 of 5"]
    assert all(line.startswith("x: ") for line in lines)
    with pytest.raises(type(error)):
        try_again("x", failing(error, 5))


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "none"), PermissionError(13, "no"), IsADirectoryError(21, "dir"), ValueError("bug")]
)
def test_permanent_errors_are_raised_at_once(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(type(error)):
        try_again("x", failing(error, 1))
    assert capsys.readouterr().err == ""


def test_a_failing_local_read_is_retried_and_then_raised(capsys: pytest.CaptureFixture[str]) -> None:
    """Reading the first page of a process's memory, which is never mapped, fails with EIO."""
    with pytest.raises(OSError, match="Input/output error"):
        open_folder("/proc/self").read_range("mem", 0, 10)
    assert len(capsys.readouterr().err.splitlines()) == 4
    assert len(OPEN_FILES) == 0 or "/proc/self/mem" not in OPEN_FILES._files


def test_reason_is_one_short_line() -> None:
    assert reason(OSError(errno.EIO, "Input/output error")) == "Input/output error"
    assert reason(OSError("no errno,\nseveral lines")) == "no errno, several lines"
    assert reason(OSError()) == "OSError"
