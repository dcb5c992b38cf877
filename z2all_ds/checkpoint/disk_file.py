"""Writes large files: hashes them on the way and syncs them to disk in windows, with little memory.

Without the windows, the system keeps gigabytes of a file in the page cache, starts to write when it is complete, and
blocks all processes. A checksum is the SHA-256 of the SHA-256s of a file's blocks, so that several threads can compute
it: one thread hashes 1 to 2 GB per second, less than a good disk reads. Does not load torch.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

BLOCK_BYTES = 1 << 24
CHUNK_BYTES = 1 << 25
WINDOW_BYTES = 1 << 28
"""Synced at a time, while the next window is filled."""
MAX_THREADS = 8

Content = Callable[[Any], object]
"""Writes the bytes of one file, in order, to the open file passed to it."""


class DiskFile:
    """The file that `write_file` passes to a `Content`."""

    def __init__(self, file: BinaryIO, hashing: ThreadPoolExecutor, syncing: ThreadPoolExecutor) -> None:
        self._file, self._hashing, self._syncing = file, hashing, syncing
        self._blocks: list[Any] = []
        self._num_bytes = self._not_synced = 0
        self._window: Future[None] | None = None

    def write(self, content: memoryview | bytes) -> int:
        """Hash and write at the same time; return when both are done."""
        view = memoryview(content)
        parts, left = [], view
        while left:
            filled = self._num_bytes % BLOCK_BYTES
            if filled == 0:
                self._blocks.append(hashlib.sha256())
            part, left = left[: BLOCK_BYTES - filled], left[BLOCK_BYTES - filled :]
            parts.append(self._hashing.submit(self._blocks[-1].update, part))
            self._num_bytes += len(part)
        left = view
        while left:  # a nearly full disk accepts only a part
            left = left[self._file.write(left) :]
        for part_done in parts:
            part_done.result()
        self._not_synced += len(view)
        if self._not_synced >= WINDOW_BYTES:
            self._wait_for_window()
            self._window, self._not_synced = self._syncing.submit(self._sync), 0
        return len(view)

    def flush(self) -> None:
        """Do nothing, as nothing is buffered; torch.save calls it."""

    def finish(self) -> dict[str, Any]:
        """Sync the rest and return the manifest's entry."""
        self._wait_for_window()
        self._sync()
        return {"bytes": self._num_bytes, "checksum": _checksum(block.digest() for block in self._blocks)}

    def _wait_for_window(self) -> None:
        if self._window:
            self._window.result()

    def _sync(self) -> None:
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_file(path: Path, content: Content) -> dict[str, Any]:
    """Write a file and sync it to disk; return its entry in the manifest: size and checksum."""
    with path.open("wb", buffering=0) as file, hashing_threads() as hashing, ThreadPoolExecutor(1) as syncing:
        opened = DiskFile(file, hashing, syncing)
        try:
            content(opened)
        except RuntimeError as error:  # torch.save raises its own error for a full disk
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        return opened.finish()


def copy_of(source: Path) -> Content:
    """Return the content of another file."""

    def copy(target: Any) -> None:
        buffer = memoryview(bytearray(min(CHUNK_BYTES, max(1, source.stat().st_size))))
        with source.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                target.write(buffer[:count])

    return copy


def text(content: str) -> Content:
    """Return the content of a small text file, in UTF-8."""
    return lambda target: target.write(content.encode("utf-8"))


def hashing_threads() -> ThreadPoolExecutor:
    """Return the threads for `file_checksum`."""
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "hashing")


def file_checksum(path: Path, threads: ThreadPoolExecutor) -> str:
    """Return the checksum of a file on disk."""
    return _checksum(threads.map(partial(_block_digest, path), range(0, path.stat().st_size, BLOCK_BYTES)))


def _block_digest(path: Path, start: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        return hashlib.sha256(file.read(BLOCK_BYTES)).digest()


def _checksum(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()
