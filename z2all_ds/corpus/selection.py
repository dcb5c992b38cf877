"""Which documents of a domain stay: no duplicates, and no more bytes than were asked for.

It is decided when all parts are written, over their small files of keys, signatures and lengths, so that it does not
depend on which worker was first.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from z2all_ds.base.console import heartbeat
from z2all_ds.corpus.cleaning.cleaner import visible
from z2all_ds.corpus.cleaning.duplicates import KEY_BYTES, find_exact_duplicates
from z2all_ds.corpus.cleaning.near_duplicates import NUM_PERM, find_near_duplicates
from z2all_ds.corpus.converters import BuiltIn
from z2all_ds.corpus.parts import Part
from z2all_ds.corpus.settings import SourceSpec
from z2all_ds.corpus.units import MISSES_BEFORE_FULL

TITLE_CHARS = 40
KEYS_NAME = "kept.keys"
"""Keys of the documents that stay, for domains that come later."""
KEY_DTYPE = f"V{KEY_BYTES}"


@dataclass
class Dropped:
    """What one step over the whole domain took out."""

    documents: int = 0
    bytes: int = 0
    """Of JSON."""
    samples: list[str] = field(default_factory=list)


def select(
    spec: SourceSpec,
    parts: Sequence[Part],
    folder: Path,
    known_keys: Sequence[Path] = (),
) -> tuple[list[Part], dict[str, Dropped]]:
    """The same parts with their masks, which lie in `folder`, and what each step dropped.

    `known_keys`: keys of the documents of domains that come before this one; a copy of one of those is a duplicate too.
    Near duplicates are looked for within the domain: their signatures are too large to be kept with the corpus.
    """
    masks = [np.ones(part.documents, dtype=np.bool_) for part in parts]
    lengths = [part.lengths() for part in parts]
    dropped: dict[str, Dropped] = {}

    def drop(step: str, keep: Sequence[np.ndarray], samples: list[str]) -> None:
        found = dropped[step] = Dropped(samples=samples)
        for mask, kept, sizes in zip(masks, keep, lengths, strict=True):
            out = mask & ~kept
            found.documents += int(out.sum())
            found.bytes += int(sizes[out].sum())
            mask &= kept

    def titles(pairs: Sequence[tuple[int, int]], num_known: int = 0) -> list[str]:
        told = []
        for later, earlier in pairs:
            original = "one of another domain"
            if earlier >= num_known:
                original = _title(parts, lengths, earlier - num_known)
            told.append(f"{_title(parts, lengths, later - num_known)} repeats {original}")
        return told

    keys = []
    if spec.cleaning.exact_duplicates:
        with heartbeat(f"exact duplicates of {spec.domain}"):
            known = [_keys(path) for path in known_keys]
            keys = [_keys(part.file(".keys")) for part in parts]
            found = find_exact_duplicates([*known, *keys])
        drop("exact_duplicates", found.keep[len(known) :], titles(found.pairs, sum(map(len, known))))
    if spec.cleaning.near_duplicates is not None:
        with heartbeat(f"near duplicates of {spec.domain}"):
            signatures = [_signatures(part) for part in parts]
            found = find_near_duplicates(signatures, spec.cleaning.near_duplicates, masks, folder)
        drop("near_duplicates", found.keep, titles(found.pairs))
    if spec.max_bytes is not None:
        drop("max_bytes", _within(spec, masks, lengths), [])
    if spec.cleaning.exact_duplicates:
        with open(folder / KEYS_NAME, "wb") as stream:
            for some, mask in zip(keys, masks, strict=True):
                some[mask].tofile(stream)
    selected = []
    for part, mask in zip(parts, masks, strict=True):
        keep = ""
        if not mask.all():
            keep = str(folder / part.file(".keep").name)
            mask.tofile(keep)
        selected.append(replace(part, keep=keep))
    return selected, dropped


def _keys(path: Path) -> np.ndarray:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=KEY_DTYPE)
    return np.memmap(path, KEY_DTYPE, "r")


def _signatures(part: Part) -> np.ndarray:
    if part.documents == 0:
        return np.empty((0, NUM_PERM), dtype=np.uint32)
    return np.memmap(part.file(".signatures"), np.uint32, "r", shape=(part.documents, NUM_PERM))


def _title(parts: Sequence[Part], lengths: Sequence[np.ndarray], number: int) -> str:
    """What a person knows the document by: its number in the source, and its title or first words."""
    ends = np.cumsum([len(sizes) for sizes in lengths])
    which = int(np.searchsorted(ends, number, side="right"))
    sizes = lengths[which]
    place = number - int(ends[which]) + len(sizes)
    with open(parts[which].path, "rb") as stream:
        stream.seek(int(sizes[:place].sum(dtype=np.int64)))
        values = json.loads(stream.read(int(sizes[place])))
    return f"{values['id']} ({visible((values['title'] or values['content'])[:TITLE_CHARS])})"


def _within(spec: SourceSpec, masks: Sequence[np.ndarray], lengths: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Takes whole documents while they fit: a built-in's in their order, which is spread already, others' in random."""
    assert spec.max_bytes is not None
    kept = np.flatnonzero(np.concatenate([*masks, np.empty(0, np.bool_)]))
    sizes = np.concatenate([*lengths, np.empty(0, np.uint32)]).astype(np.int64)[kept]
    if int(sizes.sum()) <= spec.max_bytes:
        return list(masks)
    order = np.arange(len(kept))
    if not isinstance(spec.found_converter(), BuiltIn):
        order = np.random.Generator(np.random.PCG64(0)).permutation(len(kept))
    taken = np.zeros(sum(len(mask) for mask in masks), dtype=np.bool_)
    left, misses = spec.max_bytes, 0
    for place in order.tolist():
        size = int(sizes[place])
        if size <= left:
            taken[kept[place]] = True
            left, misses = left - size, 0
        else:
            misses += 1
            if misses == MISSES_BEFORE_FULL:
                break
    borders = np.cumsum([len(mask) for mask in masks])[:-1]
    return list(np.split(taken, borders))
