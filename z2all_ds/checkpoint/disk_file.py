"""Files on a disk: hashed while they are written, forced to the disk as they grow, in little memory.

Without that the system keeps gigabytes of such a file in its cache, starts to write when it is complete, and blocks
all processes. A checksum is the SHA-256 of the SHA-256s of a file's blocks, so that several threads can compute it: one
thread hashes 1 to 2 GB per second, less than a good disk reads. Loads no torch.
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
"""Forced to the disk at a time, while the next window is filled."""
MOST_THREADS = 8


Content = Callable[[Any], object]
"""Writes the bytes of one file, in order, to the open file that it is given."""


class DiskFile:
    """A file that `write_file` writes; its checksum needs no second reading."""

    def __init__(self, file: BinaryIO, hashing: ThreadPoolExecutor, forcing: ThreadPoolExecutor) -> None:
        self._file, self._hashing, self._forcing = file, hashing, forcing
        self._blocks: list[Any] = []
        self._num_bytes = self._not_forced = 0
        self._forced: Future[None] | None = None

    def write(self, content: memoryview | bytes) -> int:
        """Hashes and writes at the same time; both are done when it returns."""
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
        while left:  # a disk that is almost full takes a part first
            left = left[self._file.write(left) :]
        for part_done in parts:
            part_done.result()
        self._not_forced += len(view)
        if self._not_forced >= WINDOW_BYTES:
            self._wait_for_window()
            self._forced, self._not_forced = self._forcing.submit(self._force), 0
        return len(view)

    def flush(self) -> None:
        """For torch.save: nothing is buffered."""

    def finish(self) -> dict[str, Any]:
        """Forces the rest to the disk and returns the manifest's entry."""
        self._wait_for_window()
        self._force()
        return {"bytes": self._num_bytes, "checksum": _of_blocks(block.digest() for block in self._blocks)}

    def _wait_for_window(self) -> None:
        if self._forced:
            self._forced.result()

    def _force(self) -> None:
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_file(path: Path, content: Content) -> dict[str, Any]:
    """Writes a file and forces it to the disk; returns size and checksum, as the manifest has them."""
    with path.open("wb", buffering=0) as file, hashing_threads() as hashing, ThreadPoolExecutor(1) as forcing:
        opened = DiskFile(file, hashing, forcing)
        try:
            content(opened)
        except RuntimeError as error:  # torch.save hides a full disk behind an error of its own
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        return opened.finish()


def copied(source: Path) -> Content:
    """The content of another file."""

    def copy(target: Any) -> None:
        buffer = memoryview(bytearray(min(CHUNK_BYTES, max(1, source.stat().st_size))))
        with source.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                target.write(buffer[:count])

    return copy


def text(content: str) -> Content:
    """A small file, in UTF-8."""
    return lambda target: target.write(content.encode("utf-8"))


def hashing_threads() -> ThreadPoolExecutor:
    """Threads for `file_checksum`."""
    return ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "hashing")


def file_checksum(path: Path, threads: ThreadPoolExecutor) -> str:
    """Returns the checksum of a file that is on the disk."""
    return _of_blocks(threads.map(partial(_block_digest, path), range(0, path.stat().st_size, BLOCK_BYTES)))


def _block_digest(path: Path, start: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        return hashlib.sha256(file.read(BLOCK_BYTES)).digest()


def _of_blocks(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()
