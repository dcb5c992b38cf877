"""Folders of mounted file systems.

Files stay open between reads, up to a limit: opening a file takes longer than reading a document from it. So `stamp`,
which looks at the path, notices that a file was replaced or deleted; `read_range`, which uses the open file, does not.
"""

import os
import uuid
from contextlib import suppress
from pathlib import Path

from z2all_ds.base.atomic import TEMPORARY_SUFFIX, flush_to_disk, publish
from z2all_ds.base.storage.folders import Folder, Stamp, try_again
from z2all_ds.base.storage.open_files import OPEN_FILES, open_regular, require_regular


class LocalFolder(Folder):
    """A folder of a mounted file system."""

    is_local = True

    def __init__(self, location: str) -> None:
        self.location = os.path.expanduser(location or ".")
        self._prefix = self.location.rstrip("/") + "/"

    def where(self, name: str) -> str:
        return self._prefix + name

    def read(self, name: str) -> bytes:
        def read_once() -> bytes:
            with os.fdopen(open_regular(self.where(name)), "rb") as stream:
                return stream.read()

        return try_again(self.where(name), read_once)

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        path = self.where(name)
        with suppress(OSError):  # this nearly always works, and preparing the retries takes as long as the read
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
        require_regular(found.st_mode, path)
        OPEN_FILES.forget(path, unless=(found.st_dev, found.st_ino))
        return Stamp(found.st_size, found.st_mtime_ns)

    def write_whole(self, name: str, data: bytes) -> None:
        final = Path(self.where(name))
        final.parent.mkdir(parents=True, exist_ok=True)
        # Several ranks may write the same file at once: each has its own temporary file, and the last rename wins.
        temporary = final.with_name(f"{final.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
        try:
            with open(temporary, "xb") as stream:
                stream.write(data)
                flush_to_disk(stream)
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
