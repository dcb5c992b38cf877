"""Checksums of the files of a snapshot in shared memory. Does not load torch.

A state file has sums of its words as integers: the device that holds the tensors adds them up while it copies them,
faster than any hash, so that the checksum is that of the tensors, not of the copy. A sum changes with every flipped
bit, and with pages that are zeroed or come from another snapshot. Other files have the checksum of `disk_file`.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from z2all_ds.checkpoint.disk_file import BLOCK_BYTES, file_checksum, hashing_threads

WORDS = {2: "<i2", 4: "<i4", 8: "<i8"}
"""Integers of each size in bytes."""
MODULUS = 1 << 64

WordSum = tuple[int, int, int]
"""Bytes per word, number of words, and their sum modulo 2^64; a file is a sequence of these."""


def header_sum(header: bytes) -> WordSum:
    """Return the sum of a state file's header, which is padded to words of 8 bytes."""
    words = np.frombuffer(header, WORDS[8])
    return 8, len(words), int(words.sum())


def state_file_entry(sums: Sequence[WordSum]) -> dict[str, Any]:
    """Return the entry of a state file in the list of a snapshot's files."""
    size_bytes = sum(size * count for size, count, _ in sums)
    return {"bytes": size_bytes, "sums": [[size, count, total % MODULUS] for size, count, total in sums]}


def why_files_damaged(folder: Path, files: Mapping[str, Any], verify_checksums: bool = True) -> str | None:
    """Return the first difference between the files and their entries, None if there is none."""
    with hashing_threads() as threads:
        for name, entry in files.items():
            path = folder / name
            if not path.is_file() or path.is_symlink():
                return f"{name} is missing"
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
            if verify_checksums and not _matches(path, entry, threads):
                return f"{name} does not match its checksum"
    return None


def _matches(path: Path, entry: Mapping[str, Any], threads: ThreadPoolExecutor) -> bool:
    if "sums" not in entry:
        return file_checksum(path, threads) == entry["checksum"]
    if sum(size * count for size, count, _ in entry["sums"]) != entry["bytes"]:
        return False
    start = 0
    for size, count, total in entry["sums"]:
        end = start + size * count
        blocks = threads.map(partial(_block_sum, path, size, end), range(start, end, BLOCK_BYTES))
        if sum(blocks) % MODULUS != total:
            return False
        start = end
    return True


def _block_sum(path: Path, size: int, end: int, start: int) -> int:
    """Return the sum of one block; `start` and `end` are in bytes, and the last block ends at `end`."""
    count = min(BLOCK_BYTES, end - start) // size
    return int(np.fromfile(path, WORDS[size], count, offset=start).sum(dtype=np.int64))
