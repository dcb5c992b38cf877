"""Copies a file onto a disk: hashed on the way, forced there as it goes, in little memory whatever its size.

Left to itself the system would hold gigabytes of it in its cache, then make everybody wait. Loads no torch.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from z2all_ds.checkpoint.checksums import hashed_file

CHUNK_BYTES = 1 << 25
WINDOW_BYTES = 1 << 28
"""On its way to the disk at a time; one more is being filled meanwhile."""


def copy_to_disk(source: Path, target: Path) -> dict[str, Any]:
    """Returns the manifest's entry. The file is on the disk then."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max(1, source.stat().st_size))))
    with source.open("rb", buffering=0) as reading, hashed_file(target) as writing, ThreadPoolExecutor(1) as forcing:
        descriptor, forced, waiting = writing.fileno(), Future[None](), 0
        forced.set_result(None)
        while count := reading.readinto(buffer):
            writing.write(buffer[:count])
            waiting += count
            if waiting >= WINDOW_BYTES:
                forced.result()
                forced, waiting = forcing.submit(_force, descriptor), 0
        forced.result()
        writing.flush()
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return writing.entry


def _force(descriptor: int) -> None:
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
