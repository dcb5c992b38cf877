"""Locks of op builds that were killed: while such a file exists, every process that wants the op waits in silence.

Only the operating system is asked; whoever holds a lock is found through /proc.
"""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

INVISIBLE_HOLDER_SECONDS = 15 * 60
"""A lock whose holder we might not see counts as stale after this; the slowest op we build takes minutes."""
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # a constant of the Linux kernel (PROC_PID_INIT_INO)
_NETWORK_FILE_SYSTEM = re.compile(r"(nfs4?|cifs|smb3|smbfs|lustre|gpfs|ceph|beegfs|glusterfs|afs|9p|virtiofs|fuse\..*)")


@dataclass(frozen=True)
class BuildLock:
    """The `lock` file in an op's build folder. While it exists, every process that wants the op waits, in silence."""

    path: Path
    state: str
    """held: a process of this machine builds. stale: nobody does. unknown: someone we cannot see might."""
    age_seconds: float


def find_locks(folder: str | os.PathLike[str]) -> list[BuildLock]:
    """All build locks under an extension folder, each with our verdict.

    torch creates the file and keeps its descriptor open while it builds, so a lock that no process has open belongs to
    a build that died. Two exceptions: its ninja may have outlived it and still write there; and the holder may be out
    of our sight (another host, another container, another user), where only the age of the lock speaks.
    """
    found: dict[Path, tuple[os.stat_result, os.stat_result]] = {}
    for pattern in ("lock", "*/lock", "*/*/lock"):  # an op's own folder, and one or two levels above it
        for path in sorted(Path(folder).glob(pattern)):
            try:
                found[path] = (path.stat(), path.parent.stat())
            except FileNotFoundError:  # released meanwhile
                continue
    if not found:
        return []
    # Locks first, holders second: whoever holds one of these locks opened it before we look.
    open_files, folders_of_ninjas = _open_lock_files(), _working_folders_of_ninjas()
    locks = []
    for path, (seen, build_folder) in found.items():
        age = time.time() - seen.st_mtime
        state = "stale"
        if _identity(seen) in open_files or _identity(build_folder) in folders_of_ninjas:
            state = "held"
        elif age < INVISIBLE_HOLDER_SECONDS:
            foreign = os.geteuid() not in (0, seen.st_uid)
            state = "unknown" if foreign or holder_may_be_out_of_sight(path) else "stale"
        locks.append(BuildLock(path, state, age))
    return locks


def find_stale_locks(folder: str | os.PathLike[str]) -> list[Path]:
    """Locks under an extension folder that no build holds any more."""
    return [lock.path for lock in find_locks(folder) if lock.state == "stale"]


def remove_stale_locks(folder: str | os.PathLike[str]) -> list[Path]:
    """Removes them and says which."""
    removed = []
    for path in find_stale_locks(folder):
        try:
            path.unlink()
        except FileNotFoundError:  # another process cleaned up as well
            continue
        removed.append(path)
    return removed


def holder_may_be_out_of_sight(path: Path, mounts: str | None = None, pid_namespace: str | None = None) -> bool:
    """Whether a process that we do not find in /proc could use this file: on a network file system, or from outside our
    container (but a container's own root, an overlay, is seen by nobody else)."""
    try:
        mounts = Path("/proc/mounts").read_text() if mounts is None else mounts
        pid_namespace = os.readlink("/proc/self/ns/pid") if pid_namespace is None else pid_namespace
    except OSError:
        return True  # no /proc: nothing can be seen
    file_system = _file_system_type(path, mounts)
    if _NETWORK_FILE_SYSTEM.fullmatch(file_system):
        return True
    return pid_namespace != _INITIAL_PID_NAMESPACE and file_system != "overlay"


def _file_system_type(path: Path, mounts: str) -> str:
    """Type of the mount that `path` is on: the longest mount point above it, the last one where several are stacked."""
    real = os.path.realpath(path)
    best_length, best_type = -1, ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[1])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best_length:
            best_length, best_type = len(point), fields[2]
    return best_type


def _identity(seen: os.stat_result) -> tuple[int, int]:
    return seen.st_dev, seen.st_ino


def _open_lock_files() -> set[tuple[int, int]]:
    """Identities of all files named `lock` that some process we may look into has open."""
    held = set()
    for process in _process_folders():
        try:
            descriptors = os.listdir(process / "fd")
        except OSError:  # ended meanwhile, or not ours to see
            continue
        for descriptor in descriptors:
            link = process / "fd" / descriptor
            try:
                if os.path.basename(os.readlink(link)) == "lock":  # stat of the others could hang on a dead mount
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
