"""Reads token shards: a corpus that `tokenizing` has tokenized, in the same order and with the same fingerprints.

Opening a block costs one look at the size of the file and one read of its documents' ends; each document is then one
read of its own. No file is mapped into memory: one that shrinks under a map ends the whole process with SIGBUS, without
a word, and what is promised is a DataError that names the file and the record. In an object store, where every read
costs a journey, the tokens of a block are read in one piece when it is opened.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from z2all_ds.data.documents import Documents, Place, TokenArray
from z2all_ds.data.token_manifest import (
    ENDS_DTYPE,
    TOKEN_DTYPES,
    TOKEN_MANIFEST_NAME,
    TokenManifest,
    TokenShard,
    parse_token_manifest,
)
from z2all_ds.errors import DataError
from z2all_ds.open_files import OPEN_FILES
from z2all_ds.storage import Folder, open_folder, reason

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

    def place(self, document_index: int) -> Place:
        number = self._shard_of(document_index)
        return Place(self._shards[number].path, document_index - self._first_document[number])

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


class TokenBlock:
    """Neighbouring documents of one shard, the records `first` to `end` - 1."""

    def __init__(self, folder: Folder, shard: TokenShard, ids: _Ids, first: int, end: int) -> None:
        self.num_documents = end - first
        self._folder, self._name, self._first_record = folder, shard.tokens_file, first
        self._path = folder.where(shard.tokens_file)
        self._ids, self._dtype, self._width = ids, ids.dtype, ids.dtype.itemsize
        self._eot_bytes = np.array(ids.eot_id, ids.dtype).tobytes()
        # An id that the dtype can hold and the tokenizer does not have; none where the vocabulary fills it.
        self._id_limit = ids.size if ids.size < 1 << (8 * self._width) else None
        self._check_size(shard.tokens * self._width)
        # [num_documents + 1]: where each document begins, and where the last one ends. A memoryview gives plain
        # integers at once, at a fraction of what indexing an array costs.
        self._borders = self._read_borders(shard, first, end).data
        self._fetched = None if folder.is_local else self._read(0, self.num_documents)

    def tokens(self, number: int) -> TokenArray:
        """Some microseconds: this is the whole cost of a document that was tokenized before."""
        borders, width = self._borders, self._width
        begin, end = borders[number] * width, borders[number + 1] * width
        if self._fetched is not None:
            base = borders[0] * width
            data = self._fetched[begin - base : end - base]
        else:
            try:
                data = OPEN_FILES.read_range(self._path, begin, end)
            except OSError:
                data = b""
            if len(data) != end - begin:
                data = self._read(number, number + 1)  # which tries again, or says what is wrong
        document = np.frombuffer(data, self._dtype)
        if not data.endswith(self._eot_bytes):
            rule = f"the document ends with token {document[-1]} and not with {self._ids.eot_id}, <|endoftext|>"
            raise DataError(self._where(number), rule, _FIX)
        # argmax() takes half the time of max() at a thousand tokens.
        if self._id_limit is not None and document.item(document.argmax()) >= self._id_limit:
            rule = f"token {document.max()} is not one of the {self._id_limit} of the tokenizer"
            raise DataError(self._where(number), rule, _FIX)
        return document

    def _read(self, first: int, end: int) -> bytes:
        """The bytes of the documents `first` to `end` - 1."""
        begin_byte, end_byte = self._borders[first] * self._width, self._borders[end] * self._width
        try:
            data = self._folder.read_range(self._name, begin_byte, end_byte)
        except OSError as error:
            raise DataError(self._where(first), f"the tokens cannot be read ({reason(error)})", _FIX) from error
        if len(data) != end_byte - begin_byte:
            rule = f"the file ends {end_byte - begin_byte - len(data)} bytes before the document does"
            raise DataError(self._where(first), rule, "Leave a corpus alone while a run reads it. " + _FIX)
        return data

    def _read_borders(self, shard: TokenShard, first: int, end: int) -> npt.NDArray[np.uint64]:
        width, name = ENDS_DTYPE.itemsize, shard.ends_file
        begin = max(0, first - 1)
        try:
            data = self._folder.read_range(name, begin * width, end * width)
        except OSError as error:
            raise DataError(self._where(0, name), f"the ends cannot be read ({reason(error)})", _FIX) from error
        if len(data) != (end - begin) * width:
            rule = f"the file of {shard.documents} ends breaks off at {begin * width + len(data)} bytes"
            raise DataError(self._where(0, name), rule, _FIX)
        borders = np.zeros(end - first + 1, np.uint64)
        borders[0 if first else 1 :] = np.frombuffer(data, ENDS_DTYPE)
        rising = borders[1:] > borders[:-1]
        if not rising.all():
            number = int(np.flatnonzero(~rising)[0])
            raise DataError(self._where(number, name), "the ends of the documents do not rise", _FIX)
        last = int(borders[-1])
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
