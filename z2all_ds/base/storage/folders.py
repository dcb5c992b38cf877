"""What a folder of files offers, wherever it lies, and how often an operation on it is tried.

What may pass (a stale handle, a lost connection) is tried again; what will not (no such file, no permission) is not.
Errors stay OSErrors: the caller knows which record they cost.
"""

import errno
import io
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from z2all_ds.base.console import say

TRIES = 5
FIRST_WAIT_SECONDS = 0.1
"""Before the second try; it doubles with each further one."""

_PASSING = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.ECONNRESET, errno.ECONNABORTED,
    errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EBUSY,
}  # fmt: skip
Answer = TypeVar("Answer")


class Stamp(NamedTuple):
    """What changes when a file does."""

    size: int
    version: int
    """Time of the last change in ns, or a number made of what the store has for it; 0 where it has nothing."""


class Folder(ABC):
    """Files under one location, by their names relative to it, with forward slashes. Can be pickled."""

    location: str
    is_local: bool

    @abstractmethod
    def where(self, name: str) -> str:
        """The whole path, for messages."""

    @abstractmethod
    def read(self, name: str) -> bytes: ...

    @abstractmethod
    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Bytes `begin` to `end` - 1; fewer only where the file ends before."""

    @abstractmethod
    def stamp(self, name: str) -> Stamp:
        """As the file is now under its name."""

    @abstractmethod
    def write_whole(self, name: str, data: bytes) -> None:
        """The file is there whole or not at all, whoever else writes it."""

    @abstractmethod
    def exists(self, name: str) -> bool: ...

    @abstractmethod
    def list_files(self) -> dict[str, int]:
        """name -> size of all files, in folders below too, sorted by name."""

    def open_file(self, name: str) -> "RangeFile":
        """For libraries that want a file."""
        return RangeFile(self, name, self.stamp(name).size)


def reason(error: OSError) -> str:
    """Why, in a few words."""
    return error.strerror or " ".join(str(error).split())[:300] or type(error).__name__


def may_pass(error: Exception) -> bool:
    """Whether another try can help."""
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    return isinstance(error, OSError) and error.errno in _PASSING


def try_again(where: str, action: Callable[[], Answer], worth_it: Callable[[Exception], bool] = may_pass) -> Answer:
    """What `action` gives, after more tries if need be. The last error is raised as it is."""
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
    """A file to read whose every read is one range of a folder's file."""

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
