"""Folders in object stores, opened by fsspec and its drivers. Errors of drivers become OSErrors."""

import errno
import hashlib
import os
from collections.abc import Callable
from typing import Any

from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.base.storage.folders import Answer, Folder, Stamp, may_pass, try_again

_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_LASTING_STATUS = (400, 401, 403, 404, 405, 410, 411, 414, 416, 501)
_NO_RANGES = "the server ignores byte ranges; use a server that supports them, or copy the folder to a disk"
_VERSION_KEYS = (
    "ETag", "etag", "md5Hash", "checksum", "generation", "blob_id", "mtime", "LastModified", "last_modified", "updated",
    "modified", "created",
)  # fmt: skip


class RemoteFolder(Folder):
    """A folder opened by a driver of fsspec. Each process makes its own connection."""

    is_local = False

    def __init__(self, location: str) -> None:
        self.location = location
        self._sizes: dict[str, int] = {}
        """Sizes found by `stamp`, which later changes make wrong."""
        self._connection: tuple[int, Any, str] | None = None
        self._connect()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None}

    def where(self, name: str) -> str:
        return f"{self.location.rstrip('/')}/{name}"

    def read(self, name: str) -> bytes:
        return self._ask(name, lambda system, path: bytes(system.cat_file(path)))

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        if begin < end and end > self._sizes.get(name, 0):
            # Beyond the end of a file, servers send nothing, an error, or the whole file.
            end = min(end, self.stamp(name).size)
        if begin >= end:
            return b""
        data = self._ask(name, lambda system, path: bytes(system.cat_file(path, start=begin, end=end)))
        if len(data) > end - begin:  # inside of the file, the whole file is always more than a part of it
            raise OSError(errno.EOPNOTSUPP, _NO_RANGES, self.where(name))
        if len(data) < end - begin:
            self._sizes.pop(name, None)
        return data

    def stamp(self, name: str) -> Stamp:
        def look(system: Any, path: str) -> Stamp:
            system.invalidate_cache(path)
            found = system.info(path)
            if found.get("type") == "directory":
                raise IsADirectoryError(errno.EISDIR, "Is a directory", path)
            return Stamp(int(found["size"]), _version_of(found))

        found = self._ask(name, look)
        self._sizes[name] = found.size
        return found

    def write_whole(self, name: str, data: bytes) -> None:
        def write(system: Any, path: str) -> None:
            try:
                system.pipe_file(path, data)
            except FileNotFoundError:  # created only when needed: stores without folders may not allow it
                system.makedirs(path.rpartition("/")[0], exist_ok=True)
                system.pipe_file(path, data)

        self._ask(name, write)

    def exists(self, name: str) -> bool:
        try:
            self.stamp(name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except IsADirectoryError:
            return True
        return True

    def list_files(self) -> dict[str, int]:
        def look(system: Any, root: str) -> dict[str, int]:
            system.invalidate_cache()
            return {path: int(info["size"] or 0) for path, info in system.find(root, detail=True).items()}

        root = self._connect()[1]
        found = self._ask("", look)
        return {path.removeprefix(root).lstrip("/"): found[path] for path in sorted(found)}

    def _connect(self) -> tuple[Any, str]:
        if self._connection is None or self._connection[0] != os.getpid():
            self._connection = (os.getpid(), *_find_driver(self.location))
        return self._connection[1:]

    def _ask(self, name: str, action: Callable[[Any, str], Answer]) -> Answer:
        """Run an action with retries; all errors become OSErrors."""

        def act() -> Answer:
            system, root = self._connect()
            return action(system, f"{root.rstrip('/')}/{name}" if name else root)

        try:
            return try_again(self.where(name), act, _may_pass_remotely)
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error


def _may_pass_remotely(error: Exception) -> bool:
    status = getattr(error, "status", None)  # of the HTTP driver's errors
    if status in _LASTING_STATUS:
        return False
    if isinstance(error, OSError):
        return may_pass(error) or (error.errno is None and not isinstance(error, _LASTING))
    return not isinstance(error, (NotImplementedError, TypeError, AttributeError, ValueError, KeyError, ImportError))


def _version_of(found: dict[str, Any]) -> int:
    for key in _VERSION_KEYS:
        if found.get(key):
            return int.from_bytes(hashlib.sha256(f"{key} {found[key]}".encode()).digest()[:7], "little")
    return 0


def _find_driver(location: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL and the path in it."""
    protocol = location.partition("://")[0]
    try:
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations
    except ImportError:
        raise MachineError(location, "URLs are opened by fsspec, which is missing", "Run pip install fsspec.") from None
    try:
        system, root = url_to_fs(location)
    except ImportError as error:
        package = _package_of(known_implementations.get(protocol, {}).get("class", protocol))
        rule = f"the driver for {protocol}:// is not installed ({error})"
        raise MachineError(location, rule, f"Run pip install {package}.") from None
    except ValueError as error:
        fix = "Give a path, or a URL of a kind that fsspec knows (s3://, gs://, hf:// ...)."
        raise ConfigError(location, f"cannot be opened ({error})", fix) from None
    return system, str(root)


def _package_of(driver: str) -> str:
    """Return the package of a driver: s3fs.S3FileSystem -> s3fs. Drivers inside fsspec may need another one."""
    inner = {"fsspec.implementations.http": "aiohttp requests", "fsspec.implementations.sftp": "paramiko"}
    return inner.get(driver.rpartition(".")[0], "" if driver.startswith("fsspec.") else driver.partition(".")[0]) or (
        f"fsspec[{driver.split('.')[2]}]"
    )
