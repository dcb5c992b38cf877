"""Chooses the documents of a domain: drops duplicates, and what exceeds the size limit.

This happens after all parts are written, from their keys, signatures and lengths, so the result does not depend on the
order in which workers finish.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from z2all_ds.base.console import heartbeat
from z2all_ds.corpus.building.parts import Part
from z2all_ds.corpus.building.settings import SourceSpec
from z2all_ds.corpus.building.units import MISSES_BEFORE_FULL
from z2all_ds.corpus.cleaning.cleaner import visible
from z2all_ds.corpus.cleaning.duplicates import KEY_BYTES, find_exact_duplicates
from z2all_ds.corpus.cleaning.near_duplicates import NUM_PERM, find_near_duplicates
from z2all_ds.corpus.converters import BuiltIn

TITLE_CHARS = 40
KEYS_NAME = "kept.keys"
"""Content keys of the selected documents, for domains that are built later."""


def select(
    spec: SourceSpec, parts: Sequence[Part], folder: Path, known_keys: Sequence[Path]
) -> tuple[list[Part], dict[str, Any]]:
    """Return the parts with their masks, which are written to `folder`, and a report of what each step dropped.

    A copy of a document of an earlier domain, whose keys are in `known_keys`, is a duplicate too. Near-duplicates are
    found only within the domain, because signatures are too large to be kept.
    """
    if not parts:
        return [], {}
    # [documents] of all parts together
    sizes = np.concatenate([part.lengths() for part in parts])
    keep = np.ones(len(sizes), np.bool_)
    borders = np.cumsum([part.documents for part in parts])[:-1]
    dropped: dict[str, Any] = {}

    def drop(step: str, selected: np.ndarray, pairs: Sequence[tuple[int, int]] = (), num_known: int = 0) -> None:
        samples = []
        for later, earlier in pairs:
            original = _title(parts, sizes, earlier - num_known) if earlier >= num_known else "one of another domain"
            samples.append(f"{_title(parts, sizes, later - num_known)} repeats {original}")
        out = keep & ~selected
        dropped[step] = {"documents": int(out.sum()), "bytes": int(sizes[out].sum()), "samples": samples}
        keep[out] = False

    keys = []
    if spec.cleaning.exact_duplicates:
        with heartbeat(f"exact duplicates of {spec.domain}"):
            known = [_keys(path) for path in known_keys]
            keys = [_keys(part.file(".keys")) for part in parts]
            found = find_exact_duplicates([*known, *keys])
        drop("exact_duplicates", np.concatenate(found.keep[len(known) :]), found.pairs, sum(map(len, known)))
    if spec.cleaning.near_duplicates is not None:
        with heartbeat(f"near duplicates of {spec.domain}"):
            signatures, masks = [_signatures(part) for part in parts], np.split(keep, borders)
            found = find_near_duplicates(signatures, spec.cleaning.near_duplicates, masks, folder)
        drop("near_duplicates", np.concatenate(found.keep), found.pairs)
    if spec.max_bytes is not None:
        drop("max_bytes", _within_limit(spec, spec.max_bytes, keep, sizes))
    masks, selected = np.split(keep, borders), []
    for part, mask in zip(parts, masks, strict=True):
        mask_file = ""
        if not mask.all():
            mask_file = str(folder / part.file(".keep").name)
            mask.tofile(mask_file)
        selected.append(replace(part, keep=mask_file))
    if keys:
        with open(folder / KEYS_NAME, "wb") as stream:
            for some, mask in zip(keys, masks, strict=True):
                some[mask].tofile(stream)
    return selected, dropped


def _keys(path: Path) -> np.ndarray:
    dtype = f"V{KEY_BYTES}"
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


def _signatures(part: Part) -> np.ndarray:
    shape = (part.documents, NUM_PERM)
    return np.memmap(part.file(".signatures"), np.uint32, "r", shape=shape) if part.documents else np.empty(shape, "u4")


def _title(parts: Sequence[Part], sizes: np.ndarray, number: int) -> str:
    """Return the id of a document and its title or first words."""
    first = 0
    for part in parts:
        if number < first + part.documents:
            break
        first += part.documents
    with open(part.path, "rb") as stream:
        stream.seek(int(sizes[first:number].sum(dtype=np.int64)))
        values = json.loads(stream.read(int(sizes[number])))
    return f"{values['id']} ({visible((values['title'] or values['content'])[:TITLE_CHARS])})"


def _within_limit(spec: SourceSpec, max_bytes: int, keep: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return a mask of documents that fit: those of a built-in converter in order, others in random order."""
    kept = np.flatnonzero(keep)
    if int(sizes[kept].sum(dtype=np.int64)) <= max_bytes:
        return keep
    if not isinstance(spec.load_converter(), BuiltIn):
        kept = kept[np.random.Generator(np.random.PCG64(0)).permutation(len(kept))]
    selected = np.zeros(len(keep), np.bool_)
    misses = 0
    for number, size in zip(kept.tolist(), sizes[kept].tolist(), strict=True):
        if size <= max_bytes:
            selected[number] = True
            max_bytes, misses = max_bytes - size, 0
        else:
            misses += 1
            if misses == MISSES_BEFORE_FULL:
                break
    return selected
