"""Shows documents of a corpus: some at random, or one by its gid. Only the shards that contain them are read."""

import json
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from z2all_ds.base.console import progress
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.storage import Folder, open_folder
from z2all_ds.base.storage.open_files import open_regular
from z2all_ds.corpus.line_index import load_or_build_index
from z2all_ds.corpus.manifest import ShardInfo, load_records_manifest
from z2all_ds.corpus.schema import Record, parse_record
from z2all_ds.corpus.shard_text import REBUILD, read_errors


def sample_documents(
    corpus_dir: str | Path, count: int, domain: str | None = None, seed: int = 0
) -> list[tuple[str, Record]]:
    """Return (shard path, document) of `count` random documents in the order of the corpus; all if there are fewer."""
    if count < 1:
        raise ConfigError(f"count {count}", "must be at least 1", "Give the number of documents to show.")
    manifest = load_records_manifest(corpus_dir)
    if domain is not None and domain not in manifest.domains:
        rule = f"the domains of {corpus_dir} are {', '.join(manifest.domains) or 'none'}"
        raise ConfigError(f"domain {domain!r}", rule, "Choose one of these.")
    shards = [shard for shard in manifest.shards if domain in (None, shard.domain)]
    total = sum(shard.documents for shard in shards)
    chosen = sorted(Random(seed).sample(range(total), min(count, total)))
    found, first = list[tuple[str, Record]](), 0
    for shard in shards:
        numbers = [number - first for number in chosen if first <= number < first + shard.documents]
        first += shard.documents
        if numbers:
            records = _Records(open_folder(corpus_dir), shard)
            found += [(shard.path, records[number]) for number in numbers]
    return found


def find_document(corpus_dir: str | Path, gid: int) -> tuple[str, Record]:
    """Return (shard path, document) of a gid.

    The gids of a corpus built here increase, so a binary search in one shard finds it. Other corpora are read in full.
    """
    shards = [shard for shard in load_records_manifest(corpus_dir).shards if shard.documents]
    first_gids = [_first_gid(corpus_dir, shard) for shard in shards]
    for first_gid, shard in sorted(zip(first_gids, shards, strict=True), key=lambda pair: pair[0], reverse=True):
        if first_gid <= gid:
            records = _Records(open_folder(corpus_dir), shard)
            number = bisect_left(records, gid, key=lambda record: record.gid)
            if number < len(records) and records[number].gid == gid:
                return shard.path, records[number]
            break
    with progress(f"search gid {gid}", sum(shard.bytes for shard in shards), "bytes") as advance:
        for shard in shards:
            for record in _all_records(corpus_dir, shard, containing=str(gid).encode()):
                if record.gid == gid:
                    return shard.path, record
            advance(shard.bytes)
    documents = sum(shard.documents for shard in shards)
    raise DataError(f"gid {gid}", f"none of the {documents:,} documents of {corpus_dir} has it", "Check the number.")


def describe(documents: Sequence[tuple[str, Record]], max_chars: int = 1000) -> Iterator[str]:
    """Yield the lines of each document. Contents are truncated to `max_chars`, other texts to fewer."""
    for path, record in documents:
        head = f"--- {path}  gid {record.gid}  id {record.id}  {record.data_src}"
        yield head + (f"  [{_truncated(record.category, 80)}]" if record.category else "")
        others = json.dumps(record.others, ensure_ascii=False) if record.others else ""
        for name, text in (("title", record.title), ("desc", record.desc), ("others", others)):
            if text:
                yield f"{name}: {_truncated(text, 200)}"
        yield f"content ({len(record.content):,} characters):"
        yield f"{_truncated(record.content, max_chars)}\n"


def _truncated(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]} ... ({len(text) - max_chars:,} more characters)"


class _Records(Sequence[Record]):
    """The records of a shard by line number, found with its line index."""

    def __init__(self, folder: Folder, shard: ShardInfo) -> None:
        self._folder, self._shard = folder, shard
        with read_errors(folder.where(shard.path)):
            self._index = load_or_build_index(folder, shard.path, folder.stamp(shard.path))
        if len(self) != shard.documents:
            rule = f"has {len(self)} records, the manifest says {shard.documents}"
            raise DataError(folder.where(shard.path), rule, REBUILD)

    def __len__(self) -> int:
        return self._index.num_lines

    def __getitem__(self, number: int) -> Record:  # type: ignore[override]
        path = self._shard.path
        with read_errors(self._folder.where(path)):
            begin, end = self._index.offsets(number, number + 1).tolist()
            line = self._folder.read_range(path, begin, end)
        return parse_record(line, f"{path}:{number + 1}")


def _first_gid(corpus_dir: str | Path, shard: ShardInfo) -> int:
    for record in _all_records(corpus_dir, shard):
        return record.gid
    rule = f"is empty, the manifest says {shard.documents:,} documents"
    raise DataError(str(Path(corpus_dir) / shard.path), rule, REBUILD)


def _all_records(corpus_dir: str | Path, shard: ShardInfo, containing: bytes = b"") -> Iterator[Record]:
    """Yield the records whose line contains some bytes; the other lines are not parsed."""
    path = Path(corpus_dir) / shard.path
    with read_errors(str(path)), os.fdopen(open_regular(path), "rb") as stream:
        for number, line in enumerate(stream, 1):
            if containing in line:
                yield parse_record(line, f"{shard.path}:{number}")
