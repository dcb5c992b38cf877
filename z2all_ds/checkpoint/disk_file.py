"""Large files on their way to a disk: hashed as they are written, forced there as they grow, in little memory.

Left to itself the system keeps gigabytes of such a file in its cache, begins to write when it is complete, and makes
everybody wait. Loads no torch.
"""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from z2all_ds.checkpoint import checksums

CHUNK_BYTES = 1 << 25
WINDOW_BYTES = 1 << 28
"""On its way to the disk at a time; one more is being filled meanwhile."""


class DiskFile:
    """Opened by `disk_file`; its checksum is known when it has been written: no second reading."""

    def __init__(self, file: BinaryIO, hashing: ThreadPoolExecutor, forcing: ThreadPoolExecutor) -> None:
        self._file, self._hashing, self._forcing = file, hashing, forcing
        self._blocks: list[Any] = []
        self._num_bytes = self._not_forced = 0
        self._forced: Future[None] | None = None

    def write(self, content: memoryview | bytes) -> None:
        """Hashes beside writing; both are done when it returns."""
        block_bytes = checksums.BLOCK_BYTES
        parts, left = [], memoryview(content)
        while left:
            filled = self._num_bytes % block_bytes
            if filled == 0:
                self._blocks.append(hashlib.sha256())
            part, left = left[: block_bytes - filled], left[block_bytes - filled :]
            parts.append(self._hashing.submit(self._blocks[-1].update, part))
            self._num_bytes += len(part)
        self._file.write(content)
        for part_done in parts:
            part_done.result()
        self._not_forced += len(content)
        if self._not_forced >= WINDOW_BYTES:
            self._wait_for_window()
            self._forced, self._not_forced = self._forcing.submit(self._force), 0

    def finish(self) -> None:
        """It is on the disk then, all of it, and the cache is rid of it."""
        self._wait_for_window()
        self._force()

    @property
    def entry(self) -> dict[str, Any]:
        """As the manifest has it."""
        return {"bytes": self._num_bytes, "checksum": checksums.of_blocks(block.digest() for block in self._blocks)}

    def _wait_for_window(self) -> None:
        if self._forced:
            self._forced.result()

    def _force(self) -> None:
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def disk_file(path: Path) -> Iterator[DiskFile]:
    with path.open("wb", buffering=0) as file, checksums.hashing_threads() as hashing, ThreadPoolExecutor(1) as forcing:
        opened = DiskFile(file, hashing, forcing)
        yield opened
        opened.finish()


def copy_to_disk(source: Path, target: Path) -> dict[str, Any]:
    """Returns the manifest's entry."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max(1, source.stat().st_size))))
    with source.open("rb", buffering=0) as reading, disk_file(target) as writing:
        while count := reading.readinto(buffer):
            writing.write(buffer[:count])
    return writing.entry
