"""Random access to documents: JSON-lines shards by a byte-offset index, and the shards of a domain as one row.

The index of a shard is made once (one pass for newlines) and kept beside it as `.NAME.idx.npy`. It carries the
shard's size and modification time, and is made again when they differ. A folder that cannot be written to costs only
that pass at each start.
"""

import json
import os
import uuid
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from z2all_ds.errors import DataError

INDEX_VERSION = 1
_HEADER_LENGTH = 3  # version, size, mtime_ns; the offsets follow
_SCAN_CHUNK_BYTES = 16 << 20
_REBUILD_FIX = "Restore the file, or build the corpus again."

Offsets = npt.NDArray[np.uint64]


class ShardInfo(Protocol):
    """What the manifest says of a shard, as far as reading needs it."""

    @property
    def path(self) -> str: ...
    @property
    def domain(self) -> str: ...
    @property
    def documents(self) -> int: ...
    @property
    def bytes(self) -> int: ...


class Shard(Protocol):
    """A file of records that can be read in any order. Other formats join in `open_shard`."""

    def read(self, record_index: int) -> dict[str, Any]: ...


class JsonlShard:
    """One record a line. The file is opened for each read: a domain may have more shards than a process may hold
    open, and opening costs some 10 µs beside the hundreds that tokenizing a document takes."""

    def __init__(self, path: Path, manifest_entry: ShardInfo | None = None) -> None:
        """With its entry in the manifest, a shard that was cut or grew since the build is noticed when it is opened."""
        self.path = path
        self._manifest_entry = manifest_entry
        self._offsets: Offsets | None = None

    @property
    def num_documents(self) -> int:
        return len(self._index()) - 1

    def read(self, record_index: int) -> dict[str, Any]:
        where = f"{self.path}, record {record_index}"
        offsets = self._index(record_index)
        begin, end = int(offsets[record_index]), int(offsets[record_index + 1])
        try:
            with open(self.path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                line = os.pread(file.fileno(), end - begin, begin)
        except OSError as error:
            raise DataError(where, f"the shard cannot be read ({error.strerror})", _REBUILD_FIX) from error
        if size != int(offsets[-1]):
            rule = f"the shard has {size} bytes and had {int(offsets[-1])} when it was opened"
            raise DataError(where, rule, "Leave a corpus alone while a run reads it. " + _REBUILD_FIX)
        try:
            record = json.loads(line)
        except ValueError as error:  # bad JSON and bad UTF-8 both
            raise DataError(where, f"the line is not JSON in UTF-8 ({error})", _REBUILD_FIX) from error
        if not isinstance(record, dict):
            raise DataError(where, "a record must be a JSON object", _REBUILD_FIX)
        return record

    def _index(self, record_index: int | None = None) -> Offsets:
        """Offset of each line and of the end of the file, [num_documents + 1]."""
        if self._offsets is None:
            where = str(self.path) if record_index is None else f"{self.path}, record {record_index}"
            try:
                offsets = load_or_build_index(self.path)
            except OSError as error:
                raise DataError(where, f"the shard cannot be read ({error.strerror})", _REBUILD_FIX) from error
            entry, found = self._manifest_entry, (len(offsets) - 1, int(offsets[-1]))
            if entry is not None and found != (entry.documents, entry.bytes):
                rule = f"the shard has {found[0]} records in {found[1]} bytes and the manifest says "
                raise DataError(where, rule + f"{entry.documents} in {entry.bytes}", _REBUILD_FIX)
            self._offsets = offsets
        return self._offsets


def index_path(shard_path: Path) -> Path:
    return shard_path.with_name(f".{shard_path.name}.idx.npy")


def load_or_build_index(shard_path: Path) -> Offsets:
    """The offsets of a shard's lines, from the cache if it belongs to the file as it is now."""
    status = os.stat(shard_path)
    header = np.array([INDEX_VERSION, status.st_size, status.st_mtime_ns], dtype=np.uint64)
    cache_path = index_path(shard_path)
    try:
        cached = np.load(cache_path, allow_pickle=False)
    except (OSError, ValueError, EOFError):  # missing, unreadable or torn: make it again
        cached = None
    if (
        cached is not None and cached.dtype == np.uint64 and cached.ndim == 1 and len(cached) > _HEADER_LENGTH
        and np.array_equal(cached[:_HEADER_LENGTH], header) and int(cached[-1]) == status.st_size
    ):  # fmt: skip
        return cached[_HEADER_LENGTH:]
    offsets = _scan_for_lines(shard_path)
    if int(offsets[-1]) == status.st_size:  # else the file grew meanwhile; the next read will say so
        _store_index(cache_path, np.concatenate([header, offsets]))
    return offsets


def _scan_for_lines(shard_path: Path) -> Offsets:
    starts, position, last_byte = [np.zeros(1, dtype=np.uint64)], 0, b"\n"
    with open(shard_path, "rb", buffering=0) as file:
        while chunk := file.read(_SCAN_CHUNK_BYTES):
            newlines = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == 10)
            starts.append((newlines + (position + 1)).astype(np.uint64))
            position += len(chunk)
            last_byte = chunk[-1:]
    if last_byte != b"\n":  # a last line without its newline is a line
        starts.append(np.array([position], dtype=np.uint64))
    return np.concatenate(starts)


def _store_index(cache_path: Path, content: Offsets) -> None:
    """Several ranks may do this at once: each writes its own temporary file, and the last rename wins."""
    temporary = cache_path.with_name(f"{cache_path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            np.save(file, content)
        os.replace(temporary, cache_path)
    except OSError:  # read-only or full: the index lives in memory, as the module's docstring says
        temporary.unlink(missing_ok=True)


def open_shard(path: Path, manifest_entry: ShardInfo) -> Shard:
    """The reader for a shard's format, by its suffix. Nothing is read yet."""
    if path.suffix != ".jsonl":
        raise DataError(str(path), f"no reader for {path.suffix or 'no suffix'!r}", "Shards are: .jsonl.")
    return JsonlShard(path, manifest_entry)


class DomainReader:
    """The documents of a domain, numbered through its shards in the order of the manifest.

    Counts come from the manifest, and a shard is opened and indexed only when a document of it is wanted, so a
    start does not wait for terabytes to be scanned.
    """

    def __init__(self, name: str, corpus_dir: Path, shards: Sequence[ShardInfo]) -> None:
        self.name = name
        self.num_bytes = sum(shard.bytes for shard in shards)
        self._shards = [open_shard(corpus_dir / shard.path, shard) for shard in shards]
        self._first_document = [0, *accumulate(shard.documents for shard in shards)]  # of each shard, and the end
        self._paths = [corpus_dir / shard.path for shard in shards]

    @property
    def num_documents(self) -> int:
        return self._first_document[-1]

    def read(self, document_index: int) -> str:
        """The text of a document: its `content` alone. Titles are often paths or numbers, and no part of the text."""
        assert 0 <= document_index < self.num_documents, (self.name, document_index, self.num_documents)
        shard = bisect_right(self._first_document, document_index) - 1
        record_index = document_index - self._first_document[shard]
        content = self._shards[shard].read(record_index).get("content")
        if not isinstance(content, str):
            where = f"{self._paths[shard]}, record {record_index}"
            raise DataError(where, f"`content` must be a text and is {type(content).__name__}", _REBUILD_FIX)
        return content


def open_domains(corpus_dir: Path, shards: Sequence[ShardInfo]) -> dict[str, DomainReader]:
    """The domains of a corpus that have documents, by sorted name."""
    by_domain: dict[str, list[ShardInfo]] = {}
    for shard in shards:
        if shard.documents > 0:
            by_domain.setdefault(shard.domain, []).append(shard)
    if not by_domain:
        raise DataError(str(corpus_dir), "the corpus has no documents", "Build it again from sources with text.")
    return {name: DomainReader(name, corpus_dir, by_domain[name]) for name in sorted(by_domain)}
