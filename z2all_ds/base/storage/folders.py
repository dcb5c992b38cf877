"""The interface of a folder of files, and retries of its operations.

Temporary errors (a stale handle, a lost connection) are retried; permanent ones (no such file, no permission) are not.
Errors stay OSErrors: the caller knows which record is affected.
"""

import errno
import io
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from z2all_ds.base.console import say

TRIES = 5
FIRST_WAIT_SECONDS = 0.1
"""Wait before the second try; doubled before each further one."""

_PASSING = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.ECONNRESET, errno.ECONNABORTED,
    errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EBUSY,
}  # fmt: skip
Answer = TypeVar("Answer")


class Stamp(NamedTuple):
    """Size and version of a file; differs if the file was changed."""

    size: int
    version: int
    """Modification time in ns, or a hash of the store's version field; 0 if the store has none."""


class Folder(ABC):
    """The files below one location, named by their relative paths with forward slashes. Can be pickled."""

    location: str
    is_local: bool

    @abstractmethod
    def where(self, name: str) -> str:
        """Return the complete path, for messages."""

    @abstractmethod
    def read(self, name: str) -> bytes: ...

    @abstractmethod
    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return bytes `begin` to `end` - 1; fewer only if the file ends before."""

    @abstractmethod
    def stamp(self, name: str) -> Stamp:
        """Return the current stamp of the file with this name."""

    @abstractmethod
    def write_whole(self, name: str, data: bytes) -> None:
        """Write a file atomically, also if other processes write the same one."""

    @abstractmethod
    def exists(self, name: str) -> bool: ...

    @abstractmethod
    def list_files(self) -> dict[str, int]:
        """Return name -> size of all files, including subfolders, sorted by name."""

    def chunks(self, name: str, size: int) -> Iterator[bytes]:
        """Yield the content of a file, `size` bytes at a time."""
        position = 0
        while chunk := self.read_range(name, position, position + size):
            yield chunk
            position += len(chunk)

    def open_file(self, name: str) -> "RangeFile":
        """Return a file object, for libraries that need one."""
        return RangeFile(self, name, self.stamp(name).size)


def reason(error: OSError) -> str:
    """Return the reason of an error in a few words."""
    return error.strerror or " ".join(str(error).split())[:300] or type(error).__name__


def may_pass(error: Exception) -> bool:
    """Return whether another try can help."""
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    return isinstance(error, OSError) and error.errno in _PASSING


def try_again(where: str, action: Callable[[], Answer], worth_it: Callable[[Exception], bool] = may_pass) -> Answer:
    """Return the result of `action`, retried after temporary errors. The last error is raised unchanged."""
    wait = FIRST_WAIT_SECONDS
    for number in range(2, TRIES + 1):
        try:
            return action()
        except Exception as error:
            if not worth_it(error):
                raise
            why = reason(error) if isinstance(error, OSError) else repr(error)
            say(f"{where}: {why}; try {number} of {TRIES} in {wait:.1f} s")
        time.sleep(wait)
        wait *= 2
    return action()


class RangeFile(io.RawIOBase):
    """A file object that reads ranges of a folder's file."""

    def __init__(self, folder: Folder, name: str, size: int) -> None:
        super().__init__()
        self._folder, self._name, self._size, self._position = folder, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._size - self._position)
        wanted = rest if size is None or size < 0 else min(size, rest)
        data = self._folder.read_range(self._name, self._position, self._position + wanted) if wanted else b""
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
