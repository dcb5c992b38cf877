"""Parts: files of records as they will lie in shards, each with small files beside it that have an entry a document.

`.lines` has the records and `.lengths` their bytes; where duplicates are looked for, `.keys` has a hash of each content
and `.signatures` its MinHash.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
import orjson

from z2all_ds.base.atomic import flush_to_disk, publish, temporary_name
from z2all_ds.corpus.cleaning import CleaningRules
from z2all_ds.corpus.cleaning.duplicates import content_key
from z2all_ds.corpus.cleaning.near_duplicates import signature
from z2all_ds.corpus.draft import Draft

BLOCK_BYTES = 262_144
SUFFIXES = (".lines", ".lengths", ".keys", ".signatures")


@dataclass(frozen=True)
class Part:
    """A finished part, and which of its documents stay."""

    path: str
    """Of the `.lines` file."""
    first_id: int
    """Of its first document."""
    documents: int
    bytes: int
    sha256: str
    keep: str = ""
    """File with one byte a document, 1 for those that stay; empty if all do."""

    def file(self, suffix: str) -> Path:
        return Path(self.path).with_suffix(suffix)

    def lengths(self) -> np.ndarray:
        return np.fromfile(self.file(".lengths"), dtype=np.uint32)

    def kept(self) -> np.ndarray:
        """Places of the documents that stay."""
        return np.flatnonzero(np.fromfile(self.keep, dtype=np.bool_)) if self.keep else np.arange(self.documents)


class PartWriter:
    """Writes parts, one after the other; `finish` renames them all, without it they are thrown away.

    Lines are gathered in one block of memory, used again and again: fresh memory for each costs more than the writing.
    """

    def __init__(
        self,
        path_of: Callable[[int], Path],
        data_src: str,
        first_gid: int,
        first_id: int,
        rules: CleaningRules,
        max_bytes: int,
    ) -> None:
        """`path_of` names the lines of each part; no part is larger than `max_bytes` unless one block is."""
        self._path_of, self._data_src, self._max_bytes = path_of, data_src, max_bytes
        self._first_gid, self._first_id = first_gid, first_id
        self._block = BytesIO()
        self._extras: dict[str, tuple[Callable[[str], bytes], BytesIO]] = {}
        if rules.exact_duplicates:
            self._extras[".keys"] = (content_key, BytesIO())
        if rules.near_duplicates is not None:
            self._extras[".signatures"] = (lambda content: signature(content).tobytes(), BytesIO())
        self.parts: list[Part] = []
        self._part_bytes = self._part_documents = 0  # without the block
        self._lengths = array("I")  # of the open part and of the block
        self._streams: dict[str, BinaryIO] = {}

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts) + len(self._lengths)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts) + self._part_bytes + self._block.tell()

    def __enter__(self) -> "PartWriter":
        self._open_part()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for number in range(len(self.parts) + 1):
            for suffix in SUFFIXES:
                temporary_name(self._path_of(number).with_suffix(suffix)).unlink(missing_ok=True)
        for stream in self._streams.values():
            try:
                stream.close()
            except OSError:  # a full disk; the error that brought us here says so
                if kind is None:
                    raise

    def write(self, drafts: Iterable[Draft]) -> None:
        """One call for all of them: this loop is a part of what every document costs."""
        add_line, add_length, extras = self._block.write, self._lengths.append, self._extras.values()
        gid, number, data_src = self._first_gid, self._first_id, self._data_src
        block_bytes = 0
        for draft in drafts:
            size = add_line(record_line(gid, number, data_src, draft))
            add_length(size)
            gid += 1
            number += 1
            for extra, block in extras:
                block.write(extra(draft.content))
            block_bytes += size
            if block_bytes >= BLOCK_BYTES:
                self._write_block()
                block_bytes = 0
        self._write_block()

    def finish(self) -> None:
        self._close_part()
        for part in self.parts:
            for suffix in (".lines", ".lengths", *self._extras):
                publish(temporary_name(part.file(suffix)), part.file(suffix))

    def _open_part(self) -> None:
        path = self._path_of(len(self.parts))
        for suffix in (".lines", ".lengths", *self._extras):
            self._streams[suffix] = open(temporary_name(path.with_suffix(suffix)), "wb")  # noqa: SIM115 - closed below
        self._digest = hashlib.sha256()

    def _close_part(self) -> None:
        self._lengths[: self._part_documents].tofile(self._streams[".lengths"])
        del self._lengths[: self._part_documents]
        for stream in self._streams.values():
            flush_to_disk(stream)
            stream.close()
        path, number = self._path_of(len(self.parts)), sum(part.documents for part in self.parts)
        sizes = (self._part_documents, self._part_bytes)
        self.parts.append(Part(str(path), self._first_id + number, *sizes, self._digest.hexdigest()))
        self._part_bytes = self._part_documents = 0

    def _write_block(self) -> None:
        size = self._block.tell()
        if self._part_bytes and self._part_bytes + size > self._max_bytes:
            self._close_part()
            self._open_part()
        with self._block.getbuffer()[:size] as lines:
            self._digest.update(lines)
        _empty(self._block, self._streams[".lines"])
        for suffix, (_, block) in self._extras.items():
            _empty(block, self._streams[suffix])
        self._part_bytes += size
        self._part_documents = len(self._lengths)


def _empty(block: BytesIO, stream: BinaryIO) -> None:
    with block.getbuffer()[: block.tell()] as data:
        stream.write(data)
    block.seek(0)


def record_line(gid: int, number: int, data_src: str, draft: Draft) -> bytes:
    """The record as a line of JSON, with the line end."""
    values = {
        "gid": gid,
        "id": number,
        "data_src": data_src,
        "category": draft.category,
        "title": draft.title,
        "content": draft.content,
        "desc": draft.desc,
        "others": draft.others,
    }
    try:
        return orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # whole numbers beyond 64 bits, which the standard library writes
        return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
