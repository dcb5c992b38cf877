"""Reads token shards: the same documents, order and fingerprints as the text they were made from.

Opening a block checks the file size, reads the ends of its documents, and reads all its tokens if they are few or in an
object store, where every read is a request; otherwise each document is read separately. Files are not memory-mapped:
if a mapped file shrinks, the process dies of SIGBUS, while a read gives a DataError that names file and record.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from z2all_ds.base.errors import DataError
from z2all_ds.base.storage import Folder, open_folder, reason
from z2all_ds.corpus.reading.shards import content_changed
from z2all_ds.corpus.reading.verification import VERIFIER
from z2all_ds.data.documents import Documents, TokenArray, TokenRun
from z2all_ds.data.token_counts import Beat
from z2all_ds.data.tokens.manifest import (
    ENDS_DTYPE,
    TOKEN_DTYPES,
    TOKEN_MANIFEST_NAME,
    TokenManifest,
    TokenShard,
    parse_token_manifest,
)

READ_WHOLE_BYTES = 128 << 10
"""Blocks up to this size are read at once. A lane holds one block per domain: at most 256 MB for 256 lanes and eight
domains."""

RUN_TOKENS = 8192
"""Short documents are returned together, about this many tokens at a time: 22.8 instead of 20.4 million tokens per
second at 194 tokens per document."""

_FIX = "Restore the file, or remove it and run `z2all corpus tokenize` again: it writes what is missing."


def is_token_corpus(location: str | Path) -> bool:
    """Return whether a folder or URL has the result of a finished `z2all corpus tokenize`."""
    return open_folder(location).exists(TOKEN_MANIFEST_NAME)


def load_token_manifest(location: str | Path) -> TokenManifest:
    folder = open_folder(location)
    where = folder.where(TOKEN_MANIFEST_NAME)
    try:
        data = folder.read(TOKEN_MANIFEST_NAME)
    except FileNotFoundError:
        fix = "Give the folder of a finished `z2all corpus tokenize`, or run it."
        raise DataError(where, "no such file; it is written after all tokens", fix) from None
    except OSError as error:
        raise DataError(where, f"cannot be read ({reason(error)})", "Restore it, or tokenize again.") from error
    return parse_token_manifest(data, where)


def open_token_corpus(location: str | Path, verify: bool = False) -> Documents:
    """Open the domains of a tokenized corpus; read only its manifest. With `verify`, checksums of files are compared
    once they are opened: in the background, except those of files that are read whole."""
    folder, manifest = open_folder(location), load_token_manifest(location)
    by_domain: dict[str, list[TokenShard]] = {}
    for shard in manifest.shards:
        by_domain.setdefault(shard.domain, []).append(shard)
    domains = {name: TokenDomain(name, folder, manifest, by_domain[name], verify) for name in sorted(by_domain)}
    return Documents(domains, manifest.tokenizer_fingerprint)


class _Ids(NamedTuple):
    """Properties of all token ids of a corpus."""

    dtype: "np.dtype[Any]"
    eot_id: int
    size: int


class TokenDomain:
    """The documents of a domain, numbered across its shards in the order of the manifest."""

    def __init__(
        self, name: str, folder: Folder, manifest: TokenManifest, shards: Sequence[TokenShard], verify: bool = False
    ) -> None:
        self.name, self.fingerprint, self._verify = name, manifest.domain_fingerprints[name], verify
        self.num_bytes = sum(shard.bytes for shard in shards)
        self.text_bytes: int | None = sum(shard.text_bytes for shard in shards)
        self.num_tokens: int | None = sum(shard.tokens for shard in shards)
        self._folder, self._shards = folder, list(shards)
        self._first_document = [0, *accumulate(shard.documents for shard in shards)]  # of each shard, and the end
        self._ids = _Ids(TOKEN_DTYPES[manifest.dtype], manifest.eot_id, manifest.tokenizer_size)
        self.num_documents = self._first_document[-1]
        self.has_sizes = all(shard.sizes_file for shard in shards)

    def open_block(self, first: int, end: int) -> "TokenBlock | JoinedTokenBlock":
        assert 0 <= first < end <= self.num_documents, (self.name, first, end, self.num_documents)
        blocks = []
        while first < end:
            number = self._shard_of(first)
            base, end_here = self._first_document[number], min(end, self._first_document[number + 1])
            shard = self._shards[number]
            if self._verify:
                VERIFIER.opened(self._folder, shard.tokens_file, shard.tokens_sha256, _FIX)
                VERIFIER.opened(self._folder, shard.ends_file, shard.ends_sha256, _FIX)
            blocks.append(TokenBlock(self._folder, shard, self._ids, first - base, end_here - base))
            first = end_here
        return blocks[0] if len(blocks) == 1 else JoinedTokenBlock(blocks)

    def location(self, document_index: int) -> tuple[str, int]:
        number = self._shard_of(document_index)
        return self._shards[number].path, document_index - self._first_document[number]

    def document_sizes(self) -> npt.NDArray[np.uint64]:
        return np.concatenate(
            [self._read_words(shard.sizes_file or "", shard.documents, shard.sizes_sha256) for shard in self._shards]
        )

    def token_counts(self, beat: Beat = lambda: None) -> npt.NDArray[np.uint64]:
        all_ends = [self._read_words(shard.ends_file, shard.documents, shard.ends_sha256) for shard in self._shards]
        return np.concatenate([np.diff(ends, prepend=np.zeros(1, ENDS_DTYPE)) for ends in all_ends])

    def _read_words(self, name: str, count: int, sha256: str | None) -> npt.NDArray[np.uint64]:
        """Return the content of a file of `count` integers."""
        try:
            data = self._folder.read(name)
        except OSError as error:
            raise DataError(self._folder.where(name), f"cannot be read ({reason(error)})", _FIX) from error
        if len(data) != (expected := count * ENDS_DTYPE.itemsize):
            raise DataError(self._folder.where(name), f"the file has {len(data)} bytes instead of {expected}", _FIX)
        if self._verify and sha256 not in (None, hashlib.sha256(data).hexdigest()):
            raise content_changed(self._folder.where(name), _FIX)
        return np.frombuffer(data, ENDS_DTYPE)

    def _shard_of(self, document_index: int) -> int:
        assert 0 <= document_index < self.num_documents, (self.name, document_index, self.num_documents)
        return bisect_right(self._first_document, document_index) - 1


class JoinedTokenBlock:
    """Adjacent documents of a domain in several shards."""

    def __init__(self, blocks: Sequence["TokenBlock"]) -> None:
        self._blocks = blocks
        self._first_number = [0, *accumulate(block.num_documents for block in blocks)]  # of each, and the end

    def tokens(self, number: int) -> TokenArray:
        index = bisect_right(self._first_number, number) - 1
        return self._blocks[index].tokens(number - self._first_number[index])

    def run(self, numbers: list[int], wanted_tokens: int) -> TokenRun:
        document = self.tokens(numbers[0])
        return TokenRun(document, [len(document)])


class TokenBlock:
    """Adjacent documents of one shard, the records `first` to `end` - 1."""

    def __init__(self, folder: Folder, shard: TokenShard, ids: _Ids, first: int, end: int) -> None:
        self.num_documents = end - first
        self._folder, self._shard, self._first_record, self._ids = folder, shard, first, ids
        self._check_size()
        self._borders = self._read_borders(end)
        self._all: TokenArray | None = None
        self._all_valid = False
        if (self._borders[-1] - self._borders[0]) * ids.dtype.itemsize <= READ_WHOLE_BYTES or not folder.is_local:
            self._all = self._read(0, self.num_documents)
            last_tokens = self._all[np.array(self._borders[1:]) - self._borders[0] - 1]
            # If something is wrong, `tokens` raises the error for the document in question.
            self._all_valid = bool(self._all.max() < ids.size and (last_tokens == ids.eot_id).all())

    def tokens(self, number: int) -> TokenArray:
        if self._all is None:
            document = self._read(number, number + 1)
        else:
            base = self._borders[0]
            document = self._all[self._borders[number] - base : self._borders[number + 1] - base]
            if self._all_valid:
                return document
        eot_id, size = self._ids.eot_id, self._ids.size
        if document[-1] != eot_id:
            rule = f"the document ends with token {document[-1]} instead of {eot_id}, the end of documents"
            raise DataError(self._where(number), rule, _FIX)
        if document.max() >= size:
            rule = f"token {document.max()} is not one of the {size} of the tokenizer"
            raise DataError(self._where(number), rule, _FIX)
        return document

    def run(self, numbers: list[int], wanted_tokens: int) -> TokenRun:
        """Return about RUN_TOKENS tokens of a block that was read at once, otherwise a single document."""
        everything, borders = self._all, self._borders
        if everything is None or not self._all_valid:
            document = self.tokens(numbers[0])
            return TokenRun(document, [len(document)])
        base, total, parts, ends = borders[0], 0, [], []
        for number in numbers:
            begin, end = borders[number], borders[number + 1]
            parts.append(everything[begin - base : end - base])
            total += end - begin
            ends.append(total)
            if total >= RUN_TOKENS:
                break
        return TokenRun(parts[0] if len(parts) == 1 else np.concatenate(parts), ends)

    def _read(self, first: int, end: int) -> TokenArray:
        """Return the tokens of the documents `first` to `end` - 1."""
        width = self._ids.dtype.itemsize
        begin_byte, end_byte = self._borders[first] * width, self._borders[end] * width
        try:
            data = self._folder.read_range(self._shard.tokens_file, begin_byte, end_byte)
        except OSError as error:
            raise DataError(self._where(first), f"the tokens cannot be read ({reason(error)})", _FIX) from error
        if len(data) != end_byte - begin_byte:
            rule = f"the file was cut off at byte {begin_byte + len(data)} while it was read"
            raise DataError(self._where(first), rule, "Do not change a corpus while a run reads it. " + _FIX)
        return np.frombuffer(data, self._ids.dtype)

    def _read_borders(self, end: int) -> list[int]:
        """Return [num_documents + 1]: the start of each document, and the end of the last one."""
        shard, first, width = self._shard, self._first_record, ENDS_DTYPE.itemsize
        begin = max(0, first - 1)
        try:
            data = self._folder.read_range(shard.ends_file, begin * width, end * width)
        except OSError as error:
            raise self._ends_error(0, f"the ends cannot be read ({reason(error)})") from error
        if len(data) != (end - begin) * width:
            raise self._ends_error(
                0, f"the file of {shard.documents} ends is cut off at byte {begin * width + len(data)}"
            )
        borders: list[int] = np.frombuffer(data, ENDS_DTYPE).tolist()
        if first == 0:
            borders.insert(0, 0)
        for number in range(end - first):
            if borders[number] >= borders[number + 1]:
                raise self._ends_error(number, "the ends of the documents are not increasing")
        last = borders[-1]
        if last > shard.tokens or (end == shard.documents and last != shard.tokens):
            raise self._ends_error(self.num_documents - 1, f"the document ends at token {last} of {shard.tokens}")
        return borders

    def _check_size(self) -> None:
        expected = self._shard.tokens * self._ids.dtype.itemsize
        try:
            size = self._folder.stamp(self._shard.tokens_file).size
        except OSError as error:
            raise DataError(self._where(0), f"the tokens cannot be read ({reason(error)})", _FIX) from error
        if size != expected:
            raise DataError(self._where(0), f"the file has {size} bytes, the manifest says {expected}", _FIX)

    def _ends_error(self, number: int, rule: str) -> DataError:
        return DataError(self._where(number, self._shard.ends_file), rule, _FIX)

    def _where(self, number: int, name: str = "") -> str:
        return f"{self._folder.where(name or self._shard.tokens_file)}, record {self._first_record + number}"
