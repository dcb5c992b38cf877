"""Near duplicates: each worker stores a MinHash signature per document, then the driver compares all signatures.

Signatures and the number of bands come from datasketch. Its index (`MinHashLSH`) stores Python dictionaries, several
kilobytes per document; the join here finds the same candidates by sorting hashes of bands, in bounded memory.

A document is dropped if its signature shares at least the threshold's fraction of values with an *earlier* document of
the same band, even if that one is dropped too. So the decision on a pair depends on no other pair: it is the same for
any number of workers and any order of work. The other usual rule, keeping the first document of each connected group,
drops more: two different documents can be connected by a later third. With both rules only the first document of a
chain of versions stays, where each version is similar to the previous one.
"""

import importlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from z2all_ds.base.errors import MachineError
from z2all_ds.corpus.cleaning.duplicates import Duplicates, Indices, Mask, Pairs, Rows, buckets, first_pairs, split_mask
from z2all_ds.corpus.cleaning.shingles import shingle_hashes

Signatures = npt.NDArray[np.uint32]

NUM_PERM = 128
"""512 bytes per document; a similarity of 0.8 is estimated with a standard error of 0.035."""
SEED = 1
EMPTY = np.uint32(0xFFFFFFFF)
"""All signature values of a document without shingles; it is similar to no other."""
NEIGHBOURS = 32
"""A document is compared with that many predecessors in its run and with that many documents at the start of the run;
in runs of up to 65 documents, with all. Longer runs are boilerplate, where the first comparison decides."""
_WEIGHTS = (0.1, 0.9)  # of false and of missing candidates
_SHINGLES_PER_UPDATE = 512
"""512 shingles x 128 permutations x 4 bytes = 256 KB, which fits into the cache; 2048 took twice as long."""
_ROWS_PER_READ = 65_536
_BYTES_IN_MEMORY = 256 * 1024**2


def require_datasketch() -> Any:
    """Return the datasketch module. Called before a build starts, so that it does not fail after hours."""
    try:
        return importlib.import_module("datasketch")
    except ImportError:
        rule, fix = "near_duplicates needs it and it is not installed", "Install it: pip install 'z2all_ds[corpus]'"
        raise MachineError("package datasketch", rule, fix) from None


def signature(text: str) -> Signatures:
    """Return the MinHash signature of a document, (NUM_PERM,)."""
    hashes = shingle_hashes(text)
    minhash = _minhash().copy()  # shares the permutations, whose creation takes longer than a short document
    for start in range(0, len(hashes), _SHINGLES_PER_UPDATE):
        # One "value" that is an array: the identity as hash function lets datasketch permute all hashes at once.
        minhash.update_batch([hashes[start : start + _SHINGLES_PER_UPDATE]])
    return minhash.hashvalues.astype(np.uint32)  # 32 bits in every scheme of datasketch that we use


@cache
def _minhash() -> Any:
    return require_datasketch().MinHash(num_perm=NUM_PERM, seed=SEED, hashfunc=lambda hashes: hashes)


@cache
def bands_and_rows(threshold: float) -> tuple[int, int]:
    """Return the bands and rows per band that datasketch chooses for the threshold.

    The weights favour many candidates: each is verified, so a false one costs time, but a missing one is a duplicate in
    the corpus. For 0.8 they give 14 bands of 9 rows, which find 87% of the pairs with similarity 0.8 and 97% of those
    with 0.85; the default weights find 40% and 69%.
    """
    try:
        index = require_datasketch().MinHashLSH(threshold=threshold, num_perm=NUM_PERM, weights=_WEIGHTS)
    except ValueError:  # near 1 datasketch chooses a single band, which it rejects
        return 2, NUM_PERM // 2
    return index.b, index.r


def find_near_duplicates(
    signatures: Sequence[Signatures], threshold: float, alive: Sequence[Mask], scratch: Path
) -> Duplicates:
    """Find documents that are similar to an earlier one. `signatures`: (documents, NUM_PERM) per part, mapped or not.

    Documents that are not `alive` were dropped before and are not compared. The hashes of bands, 8 bytes per band and
    document, go to a temporary file in the folder `scratch` when they exceed 256 MB: 7 GB for 60 million documents at
    0.8. One million documents took 11 s and 290 MB of private memory, four million 41 s and 380 MB, on two busy cores.
    """
    offsets = np.cumsum([0, *(len(part) for part in signatures)])
    needed = math.ceil(threshold * NUM_PERM - 1e-9)
    alive_flat = np.concatenate([np.zeros(0, dtype=bool), *alive])
    keep, pairs = alive_flat.copy(), Pairs()
    for numbers, ranks in _runs(signatures, bands_and_rows(threshold), alive_flat, scratch):
        for later, earlier in _neighbours(numbers, ranks, keep):
            is_similar = _values_in_common(signatures, offsets, later, earlier) >= needed
            keep[later[is_similar]] = False
            pairs = first_pairs(pairs, later[is_similar], earlier[is_similar])
    return Duplicates(split_mask(keep, signatures), pairs)


def _runs(
    signatures: Sequence[Signatures], bands: tuple[int, int], alive: Mask, scratch: Path
) -> Iterator[tuple[Indices, Indices]]:
    """Yield (documents that share a band, ascending in each run; their ranks in their runs) per band and bucket."""
    num_bands, rows = bands
    hashes, not_empty = _band_hashes(signatures, num_bands, rows, scratch)
    for band in range(num_bands):
        for values, numbers in buckets([hashes[band]], not_empty & alive):
            order = np.argsort(values, kind="stable")
            values = values[order]
            same_as_before = np.zeros(len(values), dtype=bool)
            same_as_before[1:] = values[1:] == values[:-1]
            shared = same_as_before.copy()
            shared[:-1] |= same_as_before[1:]
            numbers, same_as_before = numbers[order[shared]], same_as_before[shared]
            at = np.arange(len(numbers))
            yield numbers, at - np.maximum.accumulate(np.where(same_as_before, 0, at))


def _band_hashes(signatures: Sequence[Signatures], num_bands: int, rows: int, scratch: Path) -> tuple[Rows, Mask]:
    """Return 64-bit hashes (bands, documents), and which documents have shingles, in one pass over the signatures."""
    num_documents = sum(len(part) for part in signatures)
    hashes: Rows
    if num_bands * num_documents * 8 <= _BYTES_IN_MEMORY:
        hashes = np.empty((num_bands, num_documents), dtype=np.uint64)
    else:
        with tempfile.TemporaryFile(dir=scratch) as file:
            hashes = np.memmap(file, np.uint64, "w+", shape=(num_bands, num_documents))
    not_empty = np.empty(num_documents, dtype=bool)
    first = 0
    for part in signatures:
        for start in range(0, len(part), _ROWS_PER_READ):
            read = np.asarray(part[start : start + _ROWS_PER_READ])
            into = slice(first + start, first + start + len(read))
            not_empty[into] = (read != EMPTY).any(axis=1)
            columns = np.ascontiguousarray(read[:, : num_bands * rows].T)  # (values, documents)
            for band in range(num_bands):
                folded = np.zeros(len(read), dtype=np.uint64)
                for column in columns[band * rows : (band + 1) * rows]:
                    folded = (folded ^ column) * np.uint64(0x9E3779B97F4A7C15)
                    folded ^= folded >> np.uint64(29)
                hashes[band, into] = folded
        first += len(part)
    return hashes, not_empty


def _neighbours(numbers: Indices, ranks: Indices, keep: Mask) -> Iterator[tuple[Indices, Indices]]:
    """Yield pairs (later, earlier) to compare, in rounds. A document dropped in one round is not in the next."""
    # First with the start of the run, then with predecessors: in runs of copies the first round decides.
    for rank in range(NEIGHBOURS):
        at = np.flatnonzero(ranks > rank)
        at = at[keep[numbers[at]]]
        if not len(at):
            return  # no documents of a higher rank are left either
        yield numbers[at], numbers[at - ranks[at] + rank]
    for distance in range(1, NEIGHBOURS + 1):
        at = np.flatnonzero(ranks >= distance + NEIGHBOURS)  # lower ranks were compared above
        at = at[keep[numbers[at]]]
        yield numbers[at], numbers[at - distance]


def _values_in_common(signatures: Sequence[Signatures], offsets: Indices, one: Indices, other: Indices) -> Indices:
    """Return how many of the NUM_PERM values the two documents of each pair share."""
    common = np.empty(len(one), dtype=np.int64)
    for start in range(0, len(one), _ROWS_PER_READ):
        cut = slice(start, start + _ROWS_PER_READ)
        left, right = (_signatures_of(signatures, offsets, numbers[cut]) for numbers in (one, other))
        common[cut] = np.count_nonzero(left == right, axis=1)
    return common


def _signatures_of(signatures: Sequence[Signatures], offsets: Indices, numbers: Indices) -> Signatures:
    found = np.empty((len(numbers), NUM_PERM), dtype=np.uint32)
    part_of = np.searchsorted(offsets, numbers, side="right") - 1
    for part in np.unique(part_of):
        inside = part_of == part
        found[inside] = signatures[part][numbers[inside] - offsets[part]]
    return found
