"""Looks at documents of a corpus without reading it: some at random, or one by its number."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import BinaryIO

from z2all_ds.base.console import progress
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.corpus.manifest import ShardInfo, load_records_manifest
from z2all_ds.corpus.schema import Record, parse_record

DRAWS_PER_DOCUMENT = 20
"""So many draws for each document wanted; where they keep meeting the same few, all lines are looked up instead."""
SMALLEST_SEARCH_BYTES = 1 << 16
"""A search by halves stops at so little, and reads it."""


def sample_documents(
    corpus_dir: str | Path, count: int, domain: str | None = None, seed: int = 0
) -> list[tuple[str, Record]]:
    """(shard path, document) of `count` distinct documents, or of all if there are fewer; the same for the same seed.

    Each is the first to begin after a random byte (after the last one comes the first of the shard), so a document
    that follows a long one is likelier than others. For looking at text this is fair enough; for measuring it is not.
    """
    corpus_dir = Path(corpus_dir)
    if count < 1:
        raise ConfigError(f"count {count}", "must be at least 1", "Say how many documents you want to see.")
    shards = _shards_of(corpus_dir, domain)
    random, chosen = Random(seed), dict[tuple[str, int], None]()  # a dict, as it keeps the order
    total = sum(shard.bytes for shard in shards)
    # With many of all documents wanted, most draws would meet one that is chosen already.
    if total and count * 2 <= sum(shard.documents for shard in shards):
        for _ in range(count * DRAWS_PER_DOCUMENT):
            chosen[_next_start(corpus_dir, shards, random.randrange(total))] = None
            if len(chosen) == count:
                break
    if len(chosen) < count:
        rest = [place for place in _all_starts(corpus_dir, shards) if place not in chosen]
        chosen |= dict.fromkeys(random.sample(rest, min(len(rest), count - len(chosen))))
    return [(path, _read_at(corpus_dir, path, start)) for path, start in chosen]


def find_document(corpus_dir: str | Path, gid: int) -> tuple[str, Record]:
    """(shard path, document) with that number.

    A search by halves first, as a build numbers upwards; only a corpus that is ordered otherwise is read in full.
    """
    corpus_dir = Path(corpus_dir)
    shards = _shards_of(corpus_dir, None)
    for shard in shards:
        found = _search_ordered(corpus_dir, shard, gid)
        if found is not None:
            return shard.path, found
    digits = str(gid).encode()
    with progress(f"search gid {gid}", sum(shard.bytes for shard in shards), "bytes") as advance:
        for shard in shards:
            for start, line in _lines(corpus_dir, shard):
                # The digits alone are found fast; most lines are never parsed.
                if digits in line:
                    record = parse_record(line, f"{shard.path}, byte {start}")
                    if record.gid == gid:
                        return shard.path, record
            advance(shard.bytes)
    documents = sum(shard.documents for shard in shards)
    raise DataError(f"gid {gid}", f"no document of {corpus_dir} has it, of {documents:,}", "Check the number.")


def describe(documents: Sequence[tuple[str, Record]], max_chars: int = 1000) -> Iterator[str]:
    """Yields the lines of each document; contents are cut after max_chars, other texts earlier."""
    for path, record in documents:
        head = f"--- {path}  gid {record.gid}  id {record.id}  {record.data_src}"
        yield head + (f"  [{_cut(record.category, 80)}]" if record.category else "")
        others = json.dumps(record.others, ensure_ascii=False) if record.others else ""
        for name, text in (("title", record.title), ("desc", record.desc), ("others", others)):
            if text:
                yield f"{name}: {_cut(text, 200)}"
        yield f"content ({len(record.content):,} characters):"
        yield f"{_cut(record.content, max_chars)}\n"


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]} ... ({len(text) - max_chars:,} more characters)"


def _shards_of(corpus_dir: Path, domain: str | None) -> list[ShardInfo]:
    manifest = load_records_manifest(corpus_dir)
    if domain is not None and domain not in manifest.domains:
        rule = f"the domains of {corpus_dir} are {', '.join(manifest.domains) or 'none'}"
        raise ConfigError(f"domain {domain!r}", rule, "Choose one of these.")
    return [shard for shard in manifest.shards if domain in (None, shard.domain)]


def _open(corpus_dir: Path, path: str) -> BinaryIO:
    try:
        return open(corpus_dir / path, "rb")
    except FileNotFoundError:
        fix = "Restore it, or build the corpus again."
        raise DataError(f"{corpus_dir / path}", "no such file, but the manifest lists it", fix) from None


def _next_start(corpus_dir: Path, shards: Sequence[ShardInfo], offset: int) -> tuple[str, int]:
    """(path, byte) of the first document that begins after a byte of all shards, one after the other."""
    for shard in shards:
        if offset < shard.bytes:
            break
        offset -= shard.bytes
    with _open(corpus_dir, shard.path) as stream:
        stream.seek(offset)
        stream.readline()
        start = stream.tell()
        at_end = start >= os.fstat(stream.fileno()).st_size
    return shard.path, 0 if at_end else start


def _lines(corpus_dir: Path, shard: ShardInfo) -> Iterator[tuple[int, bytes]]:
    start = 0
    with _open(corpus_dir, shard.path) as stream:
        for line in stream:
            yield start, line
            start += len(line)


def _all_starts(corpus_dir: Path, shards: Sequence[ShardInfo]) -> list[tuple[str, int]]:
    return [(shard.path, start) for shard in shards for start, _ in _lines(corpus_dir, shard)]


def _read_at(corpus_dir: Path, path: str, start: int) -> Record:
    with _open(corpus_dir, path) as stream:
        stream.seek(start)
        return parse_record(stream.readline(), f"{path}, byte {start}")


def _search_ordered(corpus_dir: Path, shard: ShardInfo, gid: int) -> Record | None:
    """The document, if the shard has it and its gids go up; None means nothing otherwise."""
    with _open(corpus_dir, shard.path) as stream:
        low, high = 0, os.fstat(stream.fileno()).st_size
        # low is always the begin of a line; the document begins at low or later, and before high.
        while high - low > SMALLEST_SEARCH_BYTES:
            middle = (low + high) // 2
            stream.seek(middle - 1)  # if that byte ends a line, the next one begins at the middle
            stream.readline()
            start = stream.tell()
            if start >= high:
                high = middle  # no line begins in the second half
                continue
            record = parse_record(stream.readline(), f"{shard.path}, byte {start}")
            if record.gid == gid:
                return record
            low, high = (start, high) if record.gid < gid else (low, start)
        stream.seek(low)
        while stream.tell() < high:
            start = stream.tell()
            record = parse_record(stream.readline(), f"{shard.path}, byte {start}")
            if record.gid >= gid:
                return record if record.gid == gid else None
    return None
