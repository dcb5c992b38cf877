"""Folders on disk and in object stores behind one small interface: ranges of bytes in, whole files out.

A location with "://" (s3://, hf://, gs://, memory:// ...) is opened by fsspec and the driver it names; everything else
is a path. What may pass (a stale handle, a lost connection) is tried again; what will not (no such file, no permission)
is not. Errors stay OSErrors: the caller knows which record they cost.

Local files stay open between reads, up to a limit: opening one costs more than reading a document of it. So a file that
was replaced or deleted is noticed by `stamp`, which asks the path, and not by `read_range`, which asks the open file.
"""

import errno
import io
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from z2all_ds.atomic import TEMPORARY_SUFFIX, publish
from z2all_ds.console import say
from z2all_ds.open_files import OPEN_FILES

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


def open_folder(location: str | Path) -> Folder:
    """The folder at a path or URL. Nothing is read yet, but a driver that is missing is said."""
    text = str(location)
    if "://" not in text:
        return LocalFolder(text)
    from z2all_ds.remote_storage import RemoteFolder

    return RemoteFolder(text)


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


class LocalFolder(Folder):
    """A folder of a mounted file system."""

    is_local = True

    def __init__(self, location: str) -> None:
        self.location = os.path.expanduser(location or ".")
        self._prefix = self.location.rstrip("/") + "/"

    def where(self, name: str) -> str:
        return self._prefix + name

    def read(self, name: str) -> bytes:
        return try_again(self.where(name), Path(self.where(name)).read_bytes)

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        path = self.where(name)
        with suppress(OSError):  # nearly always it works at once, and what it takes to try again costs as much
            return OPEN_FILES.read_range(path, begin, end)

        def read_once() -> bytes:
            OPEN_FILES.forget(path)  # a stale handle stays stale
            try:
                return OPEN_FILES.read_range(path, begin, end)
            except OSError:
                OPEN_FILES.forget(path)
                raise

        return try_again(path, read_once)

    def stamp(self, name: str) -> Stamp:
        path = self.where(name)
        try:
            found = os.stat(path)
        except OSError:
            OPEN_FILES.forget(path)
            found = try_again(path, lambda: os.stat(path))
        OPEN_FILES.forget(path, unless=(found.st_dev, found.st_ino))
        return Stamp(found.st_size, found.st_mtime_ns)

    def write_whole(self, name: str, data: bytes) -> None:
        final = Path(self.where(name))
        final.parent.mkdir(parents=True, exist_ok=True)
        # Several ranks may write the same file at once: each has its own temporary one, and the last rename wins.
        temporary = final.with_name(f"{final.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
        try:
            with open(temporary, "xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            publish(temporary, final)
            OPEN_FILES.forget(str(final))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def exists(self, name: str) -> bool:
        return os.path.lexists(self.where(name))

    def list_files(self) -> dict[str, int]:
        def refuse(error: OSError) -> None:
            raise error

        found: dict[str, int] = {}
        seen = set()
        for folder, subfolders, names in os.walk(self.location, onerror=refuse, followlinks=True):
            real = os.path.realpath(folder)
            if real in seen:  # a link may lead back to a folder above it
                subfolders.clear()
                continue
            seen.add(real)
            for name in names:
                path = os.path.join(folder, name)
                found[Path(path).relative_to(self.location).as_posix()] = os.stat(path).st_size
        return dict(sorted(found.items()))
