"""Files kept open for reading: their number, when they are closed, threads and forks."""

import os
import threading
from multiprocessing import get_context
from pathlib import Path

import pytest

from z2all_ds.base.storage.open_files import OpenFiles, read_regular


def open_descriptors(folder: Path) -> list[str]:
    """Return the names of the files in a folder that this process has open, read from /proc."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target.startswith(str(folder)):
            found.append(Path(target).name)
    return sorted(found)


def make(folder: Path, count: int) -> list[str]:
    paths = [folder / f"{number}.txt" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(f"{number:04d}".encode() * 10)
    return [str(path) for path in paths]


def test_the_least_recently_used_file_is_closed(tmp_path: Path) -> None:
    files, paths = OpenFiles(3), make(tmp_path, 5)
    for path in [*paths[:3], paths[0], paths[3]]:
        assert files.read_range(path, 0, 40) == Path(path).read_bytes()
    assert open_descriptors(tmp_path) == ["0.txt", "2.txt", "3.txt"]
    files.forget(paths[2])
    assert open_descriptors(tmp_path) == ["0.txt", "3.txt"]
    files.forget_all()
    assert open_descriptors(tmp_path) == []


def test_a_range_is_cut_at_the_end_of_the_file(tmp_path: Path) -> None:
    files, (path,) = OpenFiles(3), make(tmp_path, 1)
    assert files.read_range(path, 38, 50) == b"00"
    assert files.read_range(path, 40, 50) == b""
    assert files.read_range(path, 7, 7) == b""
    files.forget_all()


def test_forget_keeps_the_file_with_the_given_device_and_inode(tmp_path: Path) -> None:
    files, (path,) = OpenFiles(3), make(tmp_path, 1)
    files.read_range(path, 0, 1)
    before = os.stat(path)
    files.forget(path, unless=(before.st_dev, before.st_ino))
    assert len(files) == 1
    files.forget(path, unless=(before.st_dev, before.st_ino + 1))
    assert len(files) == 0


def test_threads_read_correct_data_while_files_are_closed(tmp_path: Path) -> None:
    files, paths = OpenFiles(2), make(tmp_path, 8)
    wrong: list[object] = []

    def read_all(shift: int) -> None:
        try:
            for round_number in range(300):
                number = (round_number * 3 + shift) % 8
                if files.read_range(paths[number], 4, 8) != f"{number:04d}".encode():
                    wrong.append((shift, number))
        except OSError as error:
            wrong.append(error)

    threads = [threading.Thread(target=read_all, args=(shift,)) for shift in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(open_descriptors(tmp_path)) == len(files) == 2
    files.forget_all()


def test_a_missing_file_leaves_nothing_open(tmp_path: Path) -> None:
    files = OpenFiles(2)
    with pytest.raises(FileNotFoundError):
        files.read_range(str(tmp_path / "none"), 0, 1)
    assert len(files) == 0


def _in_fork(folder: Path, path: str, answers: object) -> None:
    from z2all_ds.base.storage.open_files import OPEN_FILES

    at_start = open_descriptors(folder)
    text = OPEN_FILES.read_range(path, 0, 4)  # would wait forever if the lock were inherited in the locked state
    answers.put((at_start, text, open_descriptors(folder)))  # type: ignore[attr-defined]


def test_a_fork_starts_without_open_files_and_with_a_free_lock(tmp_path: Path) -> None:
    from z2all_ds.base.storage.open_files import OPEN_FILES

    first, second = make(tmp_path, 2)
    OPEN_FILES.read_range(first, 0, 4)
    fork = get_context("fork")
    answers = fork.SimpleQueue()
    child = fork.Process(target=_in_fork, args=(tmp_path, second, answers))
    with OPEN_FILES._lock:  # as if another thread were reading
        child.start()
    assert answers.get() == ([], b"0001", ["1.txt"])
    child.join()
    assert OPEN_FILES.read_range(first, 0, 4) == b"0000"
    OPEN_FILES.forget_all()


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert read_regular(tmp_path / "file") == b"content"
    os.mkfifo(tmp_path / "fifo")
    for path, reason in ((tmp_path / "fifo", "not a regular file"), (tmp_path, "Is a directory")):
        with pytest.raises(OSError, match=reason):
            read_regular(path)
