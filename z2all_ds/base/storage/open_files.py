"""A bounded number of files kept open for reading ranges, shared by all threads of a process but not by forks."""

import errno
import os
import stat
import threading
from collections import OrderedDict
from contextlib import suppress

LIMIT = 128
"""Per process. Many systems allow 1,024 open files, and a rank has others."""


def open_regular(path: str | os.PathLike[str]) -> int:
    """Return a descriptor of a regular file. A FIFO or a device, whose reading may never end, is an OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # else opening a FIFO waits for a writer
    try:
        require_regular(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def require_regular(mode: int, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file but a FIFO, a device or a socket", os.fspath(path))


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file. A FIFO or a device, whose reading may never end, is an OSError."""
    with os.fdopen(open_regular(path), "rb") as stream:
        return stream.read()


class _OpenFile:
    def __init__(self, path: str) -> None:
        self.descriptor = open_regular(path)
        found = os.fstat(self.descriptor)
        self.identity = (found.st_dev, found.st_ino)
        self.readers, self.is_dropped = 0, False


class OpenFiles:
    """Open files, the least recently used closed first; a file that is being read is closed afterwards."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._files)

    def read_range(self, path: str, begin: int, end: int) -> bytes:
        file = self._take(path)
        try:
            parts, position = [], begin
            while position < end:  # network file systems and reads above 2 GiB may return less
                part = os.pread(file.descriptor, end - position, position)
                if not part:
                    break
                parts.append(part)
                position += len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            self._give_back(file)

    def forget(self, path: str, unless: tuple[int, int] | None = None) -> None:
        """Close the file of a path, except if its (device, inode) is `unless`."""
        with self._lock:
            file = self._files.get(path)
            if file is not None and file.identity != unless:
                self._drop(self._files.pop(path))

    def forget_all(self) -> None:
        with self._lock:
            while self._files:
                self._drop(self._files.popitem()[1])

    def reset_in_child(self) -> None:
        """Drop everything after a fork: the lock may be held by a thread of the parent, which owns the files."""
        self._lock = threading.Lock()
        for file in self._files.values():
            with suppress(OSError):
                os.close(file.descriptor)
        self._files = OrderedDict()

    def _take(self, path: str) -> _OpenFile:
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
                file.readers += 1
                return file
        opened = _OpenFile(path)  # without the lock: this may take long on a network
        with self._lock:
            before = self._files.pop(path, None)  # another thread was faster
            if before is not None:
                self._drop(before)
            self._files[path] = opened
            opened.readers += 1
            while len(self._files) > self._limit:
                self._drop(self._files.popitem(last=False)[1])
        return opened

    def _give_back(self, file: _OpenFile) -> None:
        with self._lock:
            file.readers -= 1
            if file.is_dropped and not file.readers:
                os.close(file.descriptor)

    def _drop(self, file: _OpenFile) -> None:
        file.is_dropped = True
        if not file.readers:
            os.close(file.descriptor)


OPEN_FILES = OpenFiles(LIMIT)
os.register_at_fork(after_in_child=OPEN_FILES.reset_in_child)
