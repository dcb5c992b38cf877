"""Rows of hashes, gathered by their first bits: equal ones meet in one bucket, and a bucket fits into memory.

Both searches for duplicates join a whole build on hashes. Sixty million of them sorted at once take gigabytes; by
buckets it is one pass over the (mapped) files a bucket and some hundred megabytes, whatever the number of documents.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

ROWS_PER_BUCKET = 4_000_000
"""On average: 32 to 64 MB of hashes, and about four times that while they are sorted."""
ROWS_PER_READ = 1_000_000
PAIRS_SHOWN = 5


@dataclass
class Duplicates:
    """What a search found. Documents are numbered through all parts, in their order."""

    keep: list[Mask]
    """One mask a part; the first of a kind stays."""
    count: int
    pairs: list[tuple[int, int]] = field(default_factory=list)
    """A few (duplicate, the earlier document it is like), in order of the duplicates."""


def split_like(flat: Mask, parts: Sequence[np.ndarray]) -> list[Mask]:
    """A mask over all documents as one mask a part."""
    ends = np.cumsum([len(part) for part in parts])
    return np.split(flat, ends[:-1]) if len(parts) else []


def buckets(parts: Sequence[Rows], alive: Mask | None = None) -> Iterator[tuple[Rows, Indices]]:
    """Yields (rows, numbers of their documents, ascending) of one bucket after the other.

    A part is an array (documents,) or (documents, words), mapped or not; the bucket is told by the first bits of the
    first word, which must be a good hash.
    """
    num_rows = sum(len(part) for part in parts)
    bits = max(0, (num_rows - 1) // ROWS_PER_BUCKET).bit_length()
    for bucket in range(1 << bits):
        rows: list[Rows] = []
        numbers: list[Indices] = []
        first = 0
        for part in parts:
            for start in range(0, len(part), ROWS_PER_READ):
                read = np.asarray(part[start : start + ROWS_PER_READ])
                word = read if read.ndim == 1 else read[:, 0]
                # A shift by all 64 bits is undefined, so the single bucket is no comparison at all.
                inside = (word >> np.uint64(64 - bits)) == bucket if bits else np.ones(len(word), dtype=bool)
                if alive is not None:
                    inside &= alive[first + start : first + start + len(read)]
                chosen = np.flatnonzero(inside)
                rows.append(read[chosen])
                numbers.append(chosen + (first + start))
            first += len(part)
        if numbers:
            yield np.concatenate(rows), np.concatenate(numbers)
