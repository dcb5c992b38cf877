"""Checksums of large files by several threads: the SHA-256 of the SHA-256s of a file's blocks.

One thread hashes 1 to 2 GB a second, less than a good disk reads; blocks can be hashed side by side.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

BLOCK_BYTES = 1 << 24
MOST_THREADS = 8


def hashing_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "hashing")


def file_checksum(path: Path, threads: ThreadPoolExecutor) -> str:
    blocks = range(0, path.stat().st_size, BLOCK_BYTES)
    return _of_blocks(threads.map(partial(_block_digest, path), blocks))


class HashedFile:
    """A file whose checksum is known when it has been written: no second reading."""

    def __init__(self, file: BinaryIO, threads: ThreadPoolExecutor) -> None:
        self._file, self._threads = file, threads
        self._blocks: list[Any] = []
        self._num_bytes = 0

    def write(self, content: memoryview | bytes) -> None:
        """Hashes beside writing; both are done when it returns."""
        parts, left = [], memoryview(content)
        while left:
            filled = self._num_bytes % BLOCK_BYTES
            if filled == 0:
                self._blocks.append(hashlib.sha256())
            part, left = left[: BLOCK_BYTES - filled], left[BLOCK_BYTES - filled :]
            parts.append(self._threads.submit(self._blocks[-1].update, part))
            self._num_bytes += len(part)
        self._file.write(content)
        for part_done in parts:
            part_done.result()

    def fileno(self) -> int:
        return self._file.fileno()

    def flush(self) -> None:
        self._file.flush()

    @property
    def entry(self) -> dict[str, Any]:
        """As the manifest has it."""
        return {"bytes": self._num_bytes, "checksum": _of_blocks(block.digest() for block in self._blocks)}


@contextmanager
def hashed_file(path: Path) -> Iterator[HashedFile]:
    with path.open("wb") as file, hashing_threads() as threads:
        yield HashedFile(file, threads)


def _block_digest(path: Path, start: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        return hashlib.sha256(file.read(BLOCK_BYTES)).digest()


def _of_blocks(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()
