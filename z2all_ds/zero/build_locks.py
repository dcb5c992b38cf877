"""Locks of killed op builds: while such a file exists, every process that needs the op waits silently.

Only the operating system is queried; the holder of a lock is found through /proc.
"""

import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BUILDERS = {
    "deepspeed_shm_comm": "ShareMemCommBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "fused_adam": "FusedAdamBuilder",
    "async_io": "AsyncIOBuilder",
}
"""Op -> name of its DeepSpeed builder."""
INVISIBLE_HOLDER_SECONDS = 15 * 60
"""A lock whose holder may be invisible counts as stale after this time; the slowest op takes minutes to build."""
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # a constant of the Linux kernel (PROC_PID_INIT_INO)
LOCAL_FILE_SYSTEMS = ("btrfs", "ext2/ext3", "overlayfs", "ramfs", "tmpfs", "xfs", "zfs")
"""As `stat -f` names them; all others may be shared between hosts."""


@dataclass(frozen=True)
class BuildLock:
    """The `lock` file in an op's build folder. While it exists, every process that needs the op waits silently."""

    path: Path
    state: str
    """held: a process on this machine is building. stale: no process is. unknown: an invisible process might be."""
    age_seconds: float


def find_locks(folder: str | os.PathLike[str]) -> list[BuildLock]:
    """Return all build locks under an extension folder with their states.

    torch creates the file and keeps its descriptor open while it builds, so a lock that no process has open belongs to
    a build that died. Two exceptions: its ninja may have survived and still write there; and the holder may be
    invisible (another host, container or user), in which case only the age of the lock counts.
    """
    found: dict[Path, tuple[os.stat_result, os.stat_result]] = {}
    for path in sorted(Path(folder).glob("*/lock")):
        # torch writes build.ninja just after the lock. Other folders are not of torch, nor are their locks.
        if path.parent.name not in BUILDERS and not (path.parent / "build.ninja").is_file():
            continue
        with suppress(FileNotFoundError):  # released in the meantime
            found[path] = (path.stat(), path.parent.stat())
    if not found:
        return []
    # Locks first, holders second: the holder of any of these locks opened it before this check.
    open_files, folders_of_ninjas = _open_lock_files(), _working_folders_of_ninjas()
    locks = []
    for path, (seen, build_folder) in found.items():
        age = time.time() - seen.st_mtime
        state = "stale"
        if _identity(seen) in open_files or _identity(build_folder) in folders_of_ninjas:
            state = "held"
        elif age < INVISIBLE_HOLDER_SECONDS:
            foreign = os.geteuid() not in (0, seen.st_uid)
            state = "unknown" if foreign or holder_may_be_invisible(path) else "stale"
        locks.append(BuildLock(path, state, age))
    return locks


def remove_stale_locks(folder: str | os.PathLike[str]) -> list[Path]:
    """Remove stale locks and return their paths."""
    stale = [lock.path for lock in find_locks(folder) if lock.state == "stale"]
    for path in stale:
        path.unlink(missing_ok=True)  # another process may have removed it
    return stale


def holder_may_be_invisible(path: Path) -> bool:
    """Return whether a process that is not in this /proc could use the file: on a network file system, or from outside
    this container (but not on the container's own root, an overlay, which nothing else can see)."""
    try:
        is_in_container = os.readlink("/proc/self/ns/pid") != _INITIAL_PID_NAMESPACE
        answer = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True)
    except OSError:
        return True
    file_system = answer.stdout.strip()
    return file_system not in LOCAL_FILE_SYSTEMS or (is_in_container and file_system != "overlayfs")


def _identity(seen: os.stat_result) -> tuple[int, int]:
    return seen.st_dev, seen.st_ino


def _open_lock_files() -> set[tuple[int, int]]:
    """Return the identities of all files named `lock` that a visible process has open."""
    held = set()
    for process in _process_folders():
        try:
            descriptors = os.listdir(process / "fd")
        except OSError:  # the process has ended, or belongs to another user
            continue
        for descriptor in descriptors:
            link = process / "fd" / descriptor
            try:
                if os.path.basename(os.readlink(link)) == "lock":  # stat of other files could hang on a dead mount
                    held.add(_identity(link.stat()))
            except OSError:
                continue
    return held


def _working_folders_of_ninjas() -> set[tuple[int, int]]:
    folders = set()
    for process in _process_folders():
        try:
            if (process / "comm").read_text(errors="replace").strip() == "ninja":
                folders.add(_identity((process / "cwd").stat()))
        except OSError:
            continue
    return folders


def _process_folders() -> list[Path]:
    return [Path("/proc", name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []
