"""Random access to the documents of a domain, in blocks of neighbours.

Counts come from the manifest, and a shard is opened when its first document is read. So a corpus of a thousand shards
opens immediately, without indexing terabytes first.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from z2all_ds.base.errors import DataError
from z2all_ds.base.storage import Folder, open_folder
from z2all_ds.corpus.manifest import Manifest, ShardInfo, shards_fingerprint
from z2all_ds.corpus.reading.jsonl_shard import JsonlShard
from z2all_ds.corpus.reading.parquet_shard import ParquetShard
from z2all_ds.corpus.reading.shards import Shard, TextBlock, check_content
from z2all_ds.corpus.reading.skipping import SkippingBlock
from z2all_ds.corpus.reading.verification import VERIFIER
from z2all_ds.corpus.shard_text import DEFAULT_TEXT_FIELD, REBUILD

__all__ = ["DomainReader", "TextBlock", "open_domains"]

_PACKED = {".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip"}


def _open_shard(folder: Folder, entry: ShardInfo, text_field: str) -> Shard:
    """Return the reader for the suffix of a shard. Nothing is read yet."""
    suffix = PurePosixPath(entry.path).suffix.lower()
    if suffix == ".jsonl":
        return JsonlShard(folder, entry, text_field)
    if suffix == ".parquet":
        return ParquetShard(folder, entry, text_field)
    rule, fix = f"no reader for {suffix or 'no suffix'!r}", "Supported: .jsonl, .parquet."
    if suffix in _PACKED:
        rule = "a packed shard does not support random access"
        fix = "Unpack it, or make a corpus of it with `z2all corpus convert`. " + fix
    raise DataError(folder.where(entry.path), rule, fix)


class DomainReader:
    """The documents of a domain, numbered through its shards in manifest order. Can be pickled."""

    def __init__(
        self,
        name: str,
        folder: Folder,
        shards: Sequence[ShardInfo],
        text_field: str = DEFAULT_TEXT_FIELD,
        on_bad_record: str = "stop",
        verify: bool = False,
    ) -> None:
        """With `on_bad_record="skip"`, a record without a valid text is an empty document instead of an error. With
        `verify`, the checksums of opened shards are compared in the background."""
        self.name, self.folder, self._verify = name, folder, verify
        self._skips, self._bad_seen = on_bad_record == "skip", set[str]()
        self.num_bytes = sum(shard.bytes for shard in shards)
        self.num_documents = sum(shard.documents for shard in shards)
        sizes = [shard.text_bytes for shard in shards]
        self.text_bytes = None if None in sizes else sum(size or 0 for size in sizes)
        """UTF-8 bytes of the texts; None if a shard was made by an earlier version, which did not count them."""
        self.fingerprint = shards_fingerprint(shards, text_field)
        self._entries = [shard for shard in shards if shard.documents > 0]
        self._shards = [_open_shard(folder, entry, text_field) for entry in self._entries]
        self._first_document = [0, *accumulate(entry.documents for entry in self._entries)]  # per shard, then the end

    def read(self, document_index: int) -> str:
        """Return the text of a document, without its title."""
        return self.open_block(document_index, document_index + 1).text(0)

    def open_block(self, first: int, end: int) -> TextBlock:
        """Return the documents `first` to `end` - 1, which may be in several shards."""
        assert 0 <= first < end <= self.num_documents, (self.name, first, end, self.num_documents)
        starts, blocks, position = list[int](), list[TextBlock](), first
        while position < end:
            shard = bisect_right(self._first_document, position) - 1
            begin = self._first_document[shard]
            stop = min(end, self._first_document[shard + 1])
            starts.append(position - first)
            if self._verify:
                entry = self._entries[shard]
                VERIFIER.opened(self._shards[shard].folder, entry.path, entry.sha256, REBUILD)
            block = self._shards[shard].open_block(position - begin, stop - begin)
            blocks.append(SkippingBlock(block, self.name, self._bad_seen) if self._skips else block)
            position = stop
        return blocks[0] if len(blocks) == 1 else _JoinedBlocks(starts, blocks)

    def check_content(self) -> None:
        """With `verify`, compare all shards with the checksums of the manifest now."""
        for entry in self._entries if self._verify else ():
            check_content(self.folder, entry)

    def document_sizes(self) -> npt.NDArray[np.integer[Any]]:
        """Return the size of each document in bytes; reads the index of every shard, and creates missing ones."""
        return np.concatenate([shard.document_sizes() for shard in self._shards])

    def locate(self, document_index: int) -> tuple[str, int]:
        """Return the path of the shard in the manifest and the number of the record in it."""
        assert 0 <= document_index < self.num_documents, (self.name, document_index, self.num_documents)
        shard = bisect_right(self._first_document, document_index) - 1
        return self._entries[shard].path, document_index - self._first_document[shard]


class _JoinedBlocks:
    """Neighbouring documents of several shards."""

    def __init__(self, starts: list[int], blocks: list[TextBlock]) -> None:
        self._starts, self._blocks = starts, blocks

    def text(self, number: int) -> str:
        part = bisect_right(self._starts, number) - 1
        return self._blocks[part].text(number - self._starts[part])


def open_domains(
    corpus_dir: str | Path, manifest: Manifest, on_bad_record: str = "stop", verify: bool = False
) -> dict[str, DomainReader]:
    """Return the domains that have documents, sorted by name."""
    by_domain: dict[str, list[ShardInfo]] = {}
    for shard in manifest.shards:
        if shard.documents > 0:
            by_domain.setdefault(shard.domain, []).append(shard)
    if not by_domain:
        raise DataError(str(corpus_dir), "the corpus has no documents", "Build it again from sources with text.")
    folder = open_folder(corpus_dir)
    return {
        name: DomainReader(name, folder, by_domain[name], manifest.text_field, on_bad_record, verify)
        for name in sorted(by_domain)
    }
