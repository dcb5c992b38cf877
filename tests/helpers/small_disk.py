"""Disks that are full, read-only or hang, for real: file systems of their own, mounted while a test runs.

Permissions would not do: root writes all the same. Where mounting is not permitted the test is skipped and says why.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REFUSALS = ("denied", "not permitted", "superuser", "only root", "failed to setup loop device")


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[Path]:
    """A new, empty disk of that size (in whole pages) at this folder, for all processes; gone afterwards."""
    path.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path))
    try:
        yield path
    finally:
        _unmount(path)


@contextmanager
def stalling_disk(path: Path, size_bytes: int) -> Iterator[Path]:
    """A disk that `stalled` can bring to a standstill: ext4 in a file."""
    image = path.with_name(f"{path.name}.img")
    with image.open("wb") as file:
        file.truncate(size_bytes)
    if not shutil.which("mkfs.ext4") or not shutil.which("fsfreeze"):
        pytest.skip("mkfs.ext4 and fsfreeze are not here")
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    path.mkdir(parents=True, exist_ok=True)
    _mount("-o", "loop", str(image), str(path))
    try:
        yield path
    finally:
        _unmount(path)


@contextmanager
def stalled(path: Path) -> Iterator[None]:
    """Whoever writes there waits in the kernel, deaf to signals, until it is over: as on a network disk that hangs."""
    subprocess.run(["fsfreeze", "--freeze", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(path)], check=True)


@contextmanager
def read_only(path: Path) -> Iterator[Path]:
    """Nothing can be made, changed or deleted in the folder meanwhile; files that are open already can be written."""
    _mount("--bind", str(path), str(path))
    try:
        _mount("-o", "remount,bind,ro", str(path))
        yield path
    finally:
        _unmount(path)


def free_bytes(path: Path) -> int:
    seen = os.statvfs(path)
    return seen.f_bavail * seen.f_frsize


def fill(path: Path, leave_bytes: int = 0) -> Path:
    """A file that takes up the disk but for so much."""
    filler = path / "filler"
    filler.unlink(missing_ok=True)
    with filler.open("wb") as file:
        file.write(bytes(max(0, free_bytes(path) - leave_bytes)))
    return filler


def _mount(*arguments: str) -> None:
    try:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if any(
        refusal in done.stderr.lower()
        for refusal in ("denied", "not permitted", "superuser", "only root", "failed to set up loop")
    ):
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


def _unmount(path: Path) -> None:
    """At once where nothing is open there; else as soon as the last file is closed."""
    if subprocess.run(["umount", str(path)], capture_output=True).returncode:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
