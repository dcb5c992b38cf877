"""Real disks that are full, read-only or hang: separate file systems, mounted while a test runs.

File permissions are not sufficient, because root ignores them. Where mounting is not permitted, the test is skipped
with the reason.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REFUSALS = ("denied", "not permitted", "superuser", "only root", "failed to set up loop", "failed to setup loop device")


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[Path]:
    """Mount an empty disk of this size (in whole pages) at a folder, for all processes, and unmount it afterwards."""
    path.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path))
    try:
        yield path
    finally:
        _unmount(path)


@contextmanager
def stalling_disk(path: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a disk that `stalled` can freeze: ext4 in a file."""
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
    """Freeze a disk: writes wait in the kernel and ignore signals until the end, as on a network disk that hangs."""
    subprocess.run(["fsfreeze", "--freeze", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(path)], check=True)


@contextmanager
def read_only(path: Path) -> Iterator[Path]:
    """Make a folder read-only; files that are already open can still be written."""
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
    """Write a file that fills the disk except for `leave_bytes`, and return its path."""
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
    if any(refusal in done.stderr.lower() for refusal in REFUSALS):
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


def _unmount(path: Path) -> None:
    """Unmount at once if no file is open there, otherwise as soon as the last file is closed."""
    if subprocess.run(["umount", str(path)], capture_output=True).returncode:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
