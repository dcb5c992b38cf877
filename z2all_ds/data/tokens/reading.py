"""Reads token shards: a corpus that `tokenizing` has tokenized, in the same order and with the same fingerprints.

Opening a block costs one look at the size of the file, one read of its documents' ends, and one of all its tokens where
they are few, or lie in an object store, where every read costs a journey; else each document is a read of its own. No
file is mapped into memory: one that shrinks under a map ends the whole process with SIGBUS, without a word, and what is
promised is a DataError that names the file and the record.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from z2all_ds.base.errors import DataError
from z2all_ds.base.storage import Folder, open_folder, reason
from z2all_ds.data.documents import DocumentLocation, Documents, Run, TokenArray
from z2all_ds.data.tokens.manifest import (
    ENDS_DTYPE,
    TOKEN_DTYPES,
    TOKEN_MANIFEST_NAME,
    TokenManifest,
    TokenShard,
    parse_token_manifest,
)

READ_WHOLE_BYTES = 128 << 10
"""Up to so many bytes of tokens a block is read in one piece. A lane holds a block of every domain: 256 lanes and eight
domains make 256 MB of them at most."""

RUN_TOKENS = 8192
"""Short documents are handed on together, about so many tokens at a time: one by one, each costs more in calls than in
copying (22.8 instead of 20.4 million tokens a second at 194 tokens a document)."""

_FIX = "Restore the file, or remove it and run `z2all corpus tokenize` again: it writes what is missing."


def is_token_corpus(location: str | Path) -> bool:
    """Whether a finished `z2all corpus tokenize` lies there."""
    return open_folder(location).exists(TOKEN_MANIFEST_NAME)


def load_token_manifest(location: str | Path) -> TokenManifest:
    folder = open_folder(location)
    where = folder.where(TOKEN_MANIFEST_NAME)
    try:
        data = folder.read(TOKEN_MANIFEST_NAME)
    except FileNotFoundError:
        fix = "Give the folder of a finished `z2all corpus tokenize`, or run it."
        raise DataError(where, "no such file; it is written when all tokens are", fix) from None
    except OSError as error:
        raise DataError(where, f"cannot be read ({reason(error)})", "Restore it, or tokenize again.") from error
    return parse_token_manifest(data, where)


def open_token_corpus(location: str | Path) -> Documents:
    """The domains of a tokenized corpus. Only its manifest is read."""
    folder, manifest = open_folder(location), load_token_manifest(location)
    by_domain: dict[str, list[TokenShard]] = {}
    for shard in manifest.shards:
        by_domain.setdefault(shard.domain, []).append(shard)
    domains = {name: TokenDomain(name, folder, manifest, by_domain[name]) for name in sorted(by_domain)}
    return Documents(domains, manifest.tokenizer_fingerprint)


class _Ids(NamedTuple):
    """What every token of a corpus keeps to."""

    dtype: "np.dtype[Any]"
    eot_id: int
    size: int


class TokenDomain:
    """The documents of a domain, numbered through its shards in the order of the manifest."""

    def __init__(self, name: str, folder: Folder, manifest: TokenManifest, shards: Sequence[TokenShard]) -> None:
        self.name, self.fingerprint = name, manifest.domain_fingerprints[name]
        self.num_bytes = sum(shard.bytes for shard in shards)
        self._folder, self._shards = folder, list(shards)
        self._first_document = [0, *accumulate(shard.documents for shard in shards)]  # of each shard, and the end
        self._ids = _Ids(TOKEN_DTYPES[manifest.dtype], manifest.eot_id, manifest.tokenizer_size)
        self.num_documents = self._first_document[-1]

    def open_block(self, first: int, end: int) -> "TokenBlock | StraddlingBlock":
        assert 0 <= first < end <= self.num_documents, (self.name, first, end, self.num_documents)
        blocks = []
        while first < end:
            number = self._shard_of(first)
            base, end_here = self._first_document[number], min(end, self._first_document[number + 1])
            blocks.append(TokenBlock(self._folder, self._shards[number], self._ids, first - base, end_here - base))
            first = end_here
        return blocks[0] if len(blocks) == 1 else StraddlingBlock(blocks)

    def place(self, document_index: int) -> DocumentLocation:
        number = self._shard_of(document_index)
        return DocumentLocation(self._shards[number].path, document_index - self._first_document[number])

    def _shard_of(self, document_index: int) -> int:
        assert 0 <= document_index < self.num_documents, (self.name, document_index, self.num_documents)
        return bisect_right(self._first_document, document_index) - 1


class StraddlingBlock:
    """Neighbouring documents of a domain that lie in several shards."""

    def __init__(self, blocks: Sequence["TokenBlock"]) -> None:
        self._blocks = blocks
        self._first_number = [0, *accumulate(block.num_documents for block in blocks)]  # of each, and the end

    def tokens(self, number: int) -> TokenArray:
        place = bisect_right(self._first_number, number) - 1
        return self._blocks[place].tokens(number - self._first_number[place])

    def run(self, numbers: list[int], wanted_tokens: int) -> Run:
        document = self.tokens(numbers[0])
        return Run(document, [len(document)])


class TokenBlock:
    """Neighbouring documents of one shard, the records `first` to `end` - 1."""

    def __init__(self, folder: Folder, shard: TokenShard, ids: _Ids, first: int, end: int) -> None:
        self.num_documents = end - first
        self._folder, self._name, self._first_record, self._ids = folder, shard.tokens_file, first, ids
        self._check_size(shard.tokens * ids.dtype.itemsize)
        self._borders = self._read_borders(shard, first, end)
        self._row: TokenArray | None = None
        size = (self._borders[-1] - self._borders[0]) * ids.dtype.itemsize
        if size <= READ_WHOLE_BYTES or not folder.is_local:
            self._row = np.frombuffer(self._read(0, self.num_documents), ids.dtype)
            # Where something is wrong, the document that it is in says so when it is asked for.
            self._row_is_sound = self._is_sound(self._row)

    def tokens(self, number: int) -> TokenArray:
        """Some microseconds at most: this is the whole cost of a document that was tokenized before."""
        if self._row is not None:
            base = self._borders[0]
            document = self._row[self._borders[number] - base : self._borders[number + 1] - base]
            if self._row_is_sound:
                return document
        else:
            document = np.frombuffer(self._read(number, number + 1), self._ids.dtype)
        eot_id, size = self._ids.eot_id, self._ids.size
        if document[-1] != eot_id:
            rule = f"the document ends with token {document[-1]} and not with {eot_id}, <|endoftext|>"
            raise DataError(self._where(number), rule, _FIX)
        if document.max() >= size:
            rule = f"token {document.max()} is not one of the {size} of the tokenizer"
            raise DataError(self._where(number), rule, _FIX)
        return document

    def run(self, numbers: list[int], wanted_tokens: int) -> Run:
        """Up to RUN_TOKENS or so of a block that was read in one piece; a single document of any other."""
        row, borders = self._row, self._borders
        if row is None or not self._row_is_sound:
            document = self.tokens(numbers[0])
            return Run(document, [len(document)])
        base, total, parts, ends = borders[0], 0, [], []
        for number in numbers:
            begin, end = borders[number], borders[number + 1]
            parts.append(row[begin - base : end - base])
            total += end - begin
            ends.append(total)
            if total >= RUN_TOKENS:
                break
        return Run(parts[0] if len(parts) == 1 else np.concatenate(parts), ends)

    def _is_sound(self, row: TokenArray) -> bool:
        """Every document ends as it should, and every token is one of the tokenizer's."""
        base, eot_id = self._borders[0] + 1, self._ids.eot_id
        return row.max() < self._ids.size and all(row.item(end - base) == eot_id for end in self._borders[1:])

    def _read(self, first: int, end: int) -> bytes:
        """The bytes of the documents `first` to `end` - 1."""
        width = self._ids.dtype.itemsize
        begin_byte, end_byte = self._borders[first] * width, self._borders[end] * width
        try:
            data = self._folder.read_range(self._name, begin_byte, end_byte)
        except OSError as error:
            raise DataError(self._where(first), f"the tokens cannot be read ({reason(error)})", _FIX) from error
        if len(data) != end_byte - begin_byte:
            whole = bisect_right(self._borders, self._borders[first] + len(data) // width) - 1
            there = len(data) - (self._borders[whole] - self._borders[first]) * width
            missing = (self._borders[whole + 1] - self._borders[whole]) * width - there
            rule = f"the file ends {missing} bytes before the document does"
            raise DataError(self._where(whole), rule, "Leave a corpus alone while a run reads it. " + _FIX)
        return data

    def _read_borders(self, shard: TokenShard, first: int, end: int) -> list[int]:
        """[num_documents + 1]: where each document begins, and where the last one ends."""
        width, name = ENDS_DTYPE.itemsize, shard.ends_file
        begin = max(0, first - 1)
        try:
            data = self._folder.read_range(name, begin * width, end * width)
        except OSError as error:
            raise DataError(self._where(0, name), f"the ends cannot be read ({reason(error)})", _FIX) from error
        if len(data) != (end - begin) * width:
            rule = f"the file of {shard.documents} ends breaks off at {begin * width + len(data)} bytes"
            raise DataError(self._where(0, name), rule, _FIX)
        borders: list[int] = np.frombuffer(data, ENDS_DTYPE).tolist()
        if first == 0:
            borders.insert(0, 0)
        for number in range(end - first):
            if borders[number] >= borders[number + 1]:
                raise DataError(self._where(number, name), "the ends of the documents do not rise", _FIX)
        last = borders[-1]
        if last > shard.tokens or (end == shard.documents and last != shard.tokens):
            rule = f"the document ends at token {last} of {shard.tokens}"
            raise DataError(self._where(self.num_documents - 1, name), rule, _FIX)
        return borders

    def _check_size(self, expected: int) -> None:
        try:
            size = self._folder.stamp(self._name).size
        except OSError as error:
            raise DataError(self._where(0), f"the tokens cannot be read ({reason(error)})", _FIX) from error
        if size != expected:
            rule = f"the file has {size} bytes and the manifest says {expected}"
            raise DataError(self._where(0), rule, _FIX)

    def _where(self, number: int, name: str = "") -> str:
        return f"{self._folder.where(name or self._name)}, record {self._first_record + number}"
