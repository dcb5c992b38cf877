"""Atomic writes: a file is complete or absent; and clear errors for a full or read-only disk.

Files are written under a name ending in .tmp, synced to disk, and only then renamed. The folder is synced, too, since a
rename is not durable before that.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.base.paths import system_error

TEMPORARY_SUFFIX = ".tmp"


def temporary_name(final: Path) -> Path:
    """`x.jsonl` -> `x.jsonl.tmp`, in the same folder so that the rename never crosses file systems."""
    return final.with_name(final.name + TEMPORARY_SUFFIX)


def force_to_disk(path: Path) -> None:
    """Sync a file, or the renames inside a folder, so that they survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_to_disk(stream: IO[bytes]) -> None:
    """Flush and sync an open file."""
    stream.flush()
    os.fsync(stream.fileno())


def publish(temporary: Path, final: Path) -> None:
    """Rename a finished, synced file to its final name."""
    os.replace(temporary, final)
    force_to_disk(final.parent)


def open_new(path: Path, mode: int = 0o666) -> IO[bytes]:
    """Open a file for writing that nobody else has put there: one that exists is replaced, a link is not followed."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, mode), "wb")


def open_own(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a file that may exist, for writing (also an `opener` of `open`); a link is refused, not followed.

    A run folder may come from a stranger, whose links could lead to any file of this user. Folders may be links.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a reader.
        flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise _not_regular(path) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


def _not_regular(path: str | os.PathLike[str]) -> ConfigError:
    return ConfigError(os.fspath(path), "is a link or another file that is not regular", "Remove it.")


def write_whole(final: Path, data: bytes | str, mode: int = 0o666, temporary: Path | None = None) -> None:
    """Write a small file atomically; text is encoded as UTF-8. `mode` is restricted by the umask."""
    data = data.encode("utf-8") if isinstance(data, str) else data
    temporary = temporary or temporary_name(final)
    try:
        with open_new(temporary, mode) as stream:
            stream.write(data)
            flush_to_disk(stream)
        publish(temporary, final)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


class HashedFile:
    """A file with a temporary name, hashed while it is written. It is removed unless `finish` was called."""

    def __init__(self, path: Path) -> None:
        self._temporary = temporary_name(path)
        self._digest = hashlib.sha256()
        self.size = 0

    def __enter__(self) -> "HashedFile":
        self._stream = open_new(self._temporary)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._temporary.unlink(missing_ok=True)
        try:
            self._stream.close()
        except OSError:  # the disk is full; the error that ended the block says so
            if kind is None:
                raise

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self.size += self._stream.write(data)

    def finish(self, final: Path) -> None:
        flush_to_disk(self._stream)
        publish(self._temporary, final)


def make_folder(folder: Path) -> Path:
    """Create the folder if necessary and return it."""
    with explain_disk_errors(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(f"folder {folder}", f"cannot be created ({error.strerror})", "Choose another.") from None
    return folder


@contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Turn errors about a full disk or a missing permission into a MachineError."""
    try:
        yield
    except Exception as error:
        found = system_error(error)
        number = found.errno if found else None
        if number in (errno.ENOSPC, errno.EDQUOT):
            fix = "Free some space or choose another disk, then run the same command: it continues from there."
            raise MachineError(f"folder {folder}", "the disk or the quota is full", fix) from error
        if number in (errno.EACCES, errno.EPERM, errno.EROFS):
            fix = "Choose another folder or change its owner."
            raise MachineError(f"folder {folder}", "not writable", fix) from error
        raise
