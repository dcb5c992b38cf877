"""Near duplicates, in two phases: each worker stores a MinHash signature per document, the driver joins all of them.

Signatures and the number of bands come from datasketch. Its index (`MinHashLSH`) keeps Python dictionaries, several
kilobytes a document; the join here finds the same candidates by sorting hashes of bands, in bounded memory.

A document is dropped if its signature has at least the threshold's share of values in common with an *earlier*
document that it meets in a band, whether that one stays or not. Two reasons: the decision on a pair needs no other
pair, so it is the same for any number of workers and any order of work; and less is lost than when the first of each
connected group stays (the other usual rule), where two documents that are not alike can meet through a later third.
The price is the same as there: in a chain of versions, each like the one before it, only the first stays.
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
from z2all_ds.corpus.cleaning.prefix_buckets import (
    PAIRS_SHOWN,
    Duplicates,
    Indices,
    Mask,
    Rows,
    buckets,
    split_like,
)
from z2all_ds.corpus.cleaning.shingles import shingle_hashes

Signatures = npt.NDArray[np.uint32]

NUM_PERM = 128
"""512 bytes a document; a similarity of 0.8 is told with a standard error of 0.035."""
SEED = 1
EMPTY = np.uint32(0xFFFFFFFF)
"""All values of the signature of a document without shingles; it is like no other."""
NEIGHBOURS = 32
"""A document is compared with that many before it in its run, and with that many at the run's start: with all, in runs
of up to 65. Longer ones are boilerplate, where the first comparison decides."""
_WEIGHTS = (0.1, 0.9)  # of false and of missing candidates
_SHINGLES_PER_UPDATE = (
    512  # times 128 permutations times 4 bytes is 256 KB, which fits the cache; 2048 took twice as long
)
_ROWS_PER_READ = 65_536
_BYTES_IN_MEMORY = 256 * 1024**2


def require_datasketch() -> Any:
    """The library, or one line about how to get it. Call it before a build starts, not after hours of conversion."""
    try:
        return importlib.import_module("datasketch")
    except ImportError:
        rule, fix = "near_duplicates needs it and it is not installed", "Install it: pip install 'z2all_ds[corpus]'"
        raise MachineError("library datasketch", rule, fix) from None


# -- phase 1 ----------------------------------------------------------------------------------------------------------


def signature(text: str) -> Signatures:
    """The MinHash signature of a document, (NUM_PERM,)."""
    hashes = shingle_hashes(text)
    minhash = _minhash().copy()  # shares the permutations; making them anew takes longer than a short document
    for start in range(0, len(hashes), _SHINGLES_PER_UPDATE):
        # One "value" that is an array: the hash function below gives it back, and datasketch permutes it whole instead
        # of value by value. A test compares with single updates.
        minhash.update_batch([hashes[start : start + _SHINGLES_PER_UPDATE]])
    return minhash.hashvalues.astype(np.uint32)  # 32 bits in every scheme of datasketch that we use


@cache
def _minhash() -> Any:
    return require_datasketch().MinHash(num_perm=NUM_PERM, seed=SEED, hashfunc=_already_hashed)


def _already_hashed(hashes: Any) -> Any:
    return hashes


# -- phase 2 ----------------------------------------------------------------------------------------------------------


@cache
def bands_and_rows(threshold: float) -> tuple[int, int]:
    """How datasketch cuts signatures into bands for the threshold, with weights for many candidates: each is compared
    anyway, so a false one costs time and a missing one is a duplicate in the corpus. For 0.8 that is 14 bands of 9,
    which find 87% of the pairs of similarity 0.8 and 97% of 0.85; its usual weights find 40% and 69%."""
    try:
        index = require_datasketch().MinHashLSH(threshold=threshold, num_perm=NUM_PERM, weights=_WEIGHTS)
    except ValueError:  # near 1 it wants a single band, and refuses that itself
        return 2, NUM_PERM // 2
    return index.b, index.r


def find_near_duplicates(
    signatures: Sequence[Signatures],
    threshold: float,
    alive: Sequence[Mask] | None = None,
    scratch: Path | None = None,
) -> Duplicates:
    """Which documents are like an earlier one. `signatures`: (documents, NUM_PERM) per part, mapped or not.

    Documents that are not `alive` were dropped before, say as exact duplicates, and are compared with nothing. The
    hashes of bands, 8 bytes a band and document, go to a file under `scratch` (the system's place for temporary files
    if None) when they are more than a few hundred megabytes: 7 GB for 60 million documents at 0.8. A million documents
    took 11 s and 290 MB of private memory, four million 41 s and 380 MB, on two busy cores.
    """
    assert all(part.shape[1:] == (NUM_PERM,) for part in signatures), [part.shape for part in signatures]
    offsets = np.cumsum([0, *(len(part) for part in signatures)])
    needed = math.ceil(threshold * NUM_PERM - 1e-9)
    alive_flat = None if alive is None else np.concatenate([np.zeros(0, dtype=bool), *alive])
    assert alive_flat is None or len(alive_flat) == offsets[-1], "the masks belong to other parts"
    keep = np.ones(offsets[-1], dtype=bool) if alive_flat is None else alive_flat.copy()
    pairs: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory(prefix="near_duplicates_", dir=scratch) as folder:
        for numbers, places in _runs(signatures, bands_and_rows(threshold), alive_flat, Path(folder)):
            for later, earlier in _neighbours(numbers, places, keep):
                alike = _values_in_common(signatures, offsets, later, earlier) >= needed
                keep[later[alike]] = False
                pairs = sorted([*pairs, *_first_pairs(later[alike], earlier[alike])])[:PAIRS_SHOWN]
    before = len(keep) if alive_flat is None else int(alive_flat.sum())
    return Duplicates(split_like(keep, signatures), before - int(keep.sum()), pairs)


def _runs(
    signatures: Sequence[Signatures], bands: tuple[int, int], alive: Mask | None, folder: Path
) -> Iterator[tuple[Indices, Indices]]:
    """Documents that share a band, per band and bucket: (their numbers, run after run, ascending in each; the place of
    each in its run)."""
    num_bands, rows = bands
    hashes, not_empty = _band_hashes(signatures, num_bands, rows, folder)
    usable = not_empty if alive is None else not_empty & alive
    for band in range(num_bands):
        for values, numbers in buckets([hashes[band]], usable):
            order = np.argsort(values, kind="stable")
            values = values[order]
            same_as_before = np.zeros(len(values), dtype=bool)
            same_as_before[1:] = values[1:] == values[:-1]
            shared = same_as_before.copy()
            shared[:-1] |= same_as_before[1:]
            numbers, same_as_before = numbers[order[shared]], same_as_before[shared]
            at = np.arange(len(numbers))
            yield numbers, at - np.maximum.accumulate(np.where(same_as_before, 0, at))


def _band_hashes(signatures: Sequence[Signatures], num_bands: int, rows: int, folder: Path) -> tuple[Rows, Mask]:
    """(bands, documents) hashes of 64 bits, and which documents have shingles at all. One pass over the signatures:
    reading a band's columns means reading the whole file."""
    num_documents = sum(len(part) for part in signatures)
    shape = (num_bands, num_documents)
    hashes: Rows
    if num_bands * num_documents * 8 <= _BYTES_IN_MEMORY:
        hashes = np.empty(shape, dtype=np.uint64)
    else:
        hashes = np.lib.format.open_memmap(folder / "bands.npy", mode="w+", dtype=np.uint64, shape=shape)
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


def _neighbours(numbers: Indices, places: Indices, keep: Mask) -> Iterator[tuple[Indices, Indices]]:
    """Pairs (later, earlier) to compare, in rounds; a document that was dropped in one round is not in the next."""
    # The run's first members, then those just before: in runs of copies the very first round decides.
    for distance_from_start in range(NEIGHBOURS):
        at = np.flatnonzero(places > distance_from_start)
        at = at[keep[numbers[at]]]
        if not len(at):
            return  # no run has members left beyond this place, which holds for the places behind it as well
        yield numbers[at], numbers[at - places[at] + distance_from_start]
    for distance in range(1, NEIGHBOURS + 1):
        at = np.flatnonzero(places >= distance + NEIGHBOURS)  # nearer to the start: compared above
        at = at[keep[numbers[at]]]
        yield numbers[at], numbers[at - distance]


def _values_in_common(signatures: Sequence[Signatures], offsets: Indices, one: Indices, other: Indices) -> Indices:
    """How many of the NUM_PERM values two documents share, per pair."""
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


def _first_pairs(later: Indices, earlier: Indices) -> list[tuple[int, int]]:
    """Those with the smallest numbers, so that the ones shown do not depend on the order of bands."""
    first = np.argsort(later, kind="stable")[:PAIRS_SHOWN]
    return list(zip(later[first].tolist(), earlier[first].tolist(), strict=True))
