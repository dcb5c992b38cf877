"""Atomic file writes, and one-line errors for a full disk and a read-only folder."""

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from z2all_ds.base.atomic import (
    HashedFile,
    explain_disk_errors,
    make_folder,
    open_own,
    publish,
    temporary_name,
    write_whole,
)
from z2all_ds.base.errors import ConfigError, MachineError

NOBODY = 65534
OVER_A_LIMIT = """
import resource, signal, sys
from pathlib import Path
from z2all_ds.base.atomic import write_whole

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    write_whole(Path(sys.argv[1]), "a text of more than ten bytes")
except OSError as error:
    print(error.errno)
"""


def test_text_is_written_as_utf8_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    write_whole(target, "汉字\r\n")
    assert target.read_bytes() == "汉字\r\n".encode()
    write_whole(target, b"\x00\xff")
    assert target.read_bytes() == b"\x00\xff"
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_write_that_fails_halfway_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    target.write_text("old")
    answer = subprocess.run([sys.executable, "-c", OVER_A_LIMIT, str(target)], capture_output=True, text=True)
    assert answer.stdout == f"{errno.EFBIG}\n", answer.stderr
    assert target.read_text() == "old"
    assert not temporary_name(target).exists()


def test_publish_replaces_the_final_file_with_the_temporary_one(tmp_path: Path) -> None:
    final = tmp_path / "shard.jsonl"
    assert temporary_name(final) == tmp_path / "shard.jsonl.tmp"
    temporary_name(final).write_text("new")
    final.write_text("old")
    publish(temporary_name(final), final)
    assert final.read_text() == "new"
    assert os.listdir(tmp_path) == ["shard.jsonl"]


def test_a_link_in_place_of_an_own_file_is_refused(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("kept")
    link.symlink_to(target)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    for name in ("link", "dangling", "fifo"):
        with pytest.raises(ConfigError, match=rf"/{name}: is a link or another file that is not regular\. Remove it\."):
            open_own(tmp_path / name, os.O_WRONLY | os.O_TRUNC)
    assert target.read_text() == "kept" and not (tmp_path / "new").exists()
    (tmp_path / "folder").symlink_to(tmp_path)
    with open(tmp_path / "folder" / "own", "w", opener=open_own) as file:
        file.write("own")
    assert (tmp_path / "own").read_text() == "own"


def test_a_full_disk_is_a_machine_error() -> None:
    full = Path("/dev/full")  # every write to this Linux device fails with ENOSPC
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(MachineError, match=r"^folder /dev: the disk or the quota is full. Free some space") as caught:
        with explain_disk_errors(full.parent), full.open("wb", buffering=0) as stream:
            stream.write(b"x")
    assert isinstance(caught.value.__cause__, OSError)


def test_a_folder_without_permission_is_a_machine_error() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        as_root = os.geteuid() == 0
        try:
            if as_root:  # root may write everywhere, so act as an unprivileged user
                os.seteuid(NOBODY)
            with pytest.raises(MachineError) as caught, explain_disk_errors(folder):
                (folder / "x").touch()
        finally:
            if as_root:
                os.seteuid(0)
    assert str(caught.value) == f"folder {folder}: not writable. Choose another folder or change its owner."


def test_other_os_errors_pass_through_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), explain_disk_errors(tmp_path):
        (tmp_path / "missing" / "x").touch()


def test_make_folder_creates_the_folder_or_fails_with_one_line(tmp_path: Path) -> None:
    assert make_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert make_folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "inside", Path("/proc/none")):
        with pytest.raises(ConfigError, match=r"cannot be created .*Choose another\.$"):
            make_folder(place)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_hashed_file_is_complete_or_absent(tmp_path: Path) -> None:
    final = tmp_path / "a"
    with HashedFile(final) as file:
        file.write(b"ab")
        file.write(memoryview(b"c"))
        file.finish(final)
    assert (final.read_bytes(), file.size, file.sha256) == (b"abc", 3, hashlib.sha256(b"abc").hexdigest())
    with HashedFile(tmp_path / "b") as file:
        file.write(b"x")
    assert list(tmp_path.iterdir()) == [final]
