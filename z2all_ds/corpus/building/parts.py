"""Parts: files of records in the format of shards, each with small files that have one entry per document.

`.lines` has the records, `.lengths` their sizes and `.texts` the sizes of their texts in bytes. If duplicates are
removed, `.keys` has a hash of each content and `.signatures` its MinHash signature.
"""

import json
from array import array
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from z2all_ds.base.atomic import HashedFile
from z2all_ds.corpus.cleaning import CleaningRules
from z2all_ds.corpus.cleaning.duplicates import content_key
from z2all_ds.corpus.cleaning.near_duplicates import signature
from z2all_ds.corpus.draft import Draft

BLOCK_BYTES = 262_144


@dataclass(frozen=True)
class Part:
    """A finished part, and the selection of its documents."""

    path: str
    """Path of the `.lines` file."""
    first_id: int
    """Id of its first document."""
    documents: int
    bytes: int
    sha256: str
    keep: str = ""
    """File with one byte per document, 1 for the selected ones; empty if all are selected."""

    def file(self, suffix: str) -> Path:
        return Path(self.path).with_suffix(suffix)

    def lengths(self) -> np.ndarray:
        return np.fromfile(self.file(".lengths"), dtype=np.uint32)

    def text_bytes(self, selected: np.ndarray) -> int | None:
        """Return the size of the texts of these documents; None for a part of an earlier version."""
        file = self.file(".texts")
        return int(np.fromfile(file, dtype=np.uint32)[selected].sum(dtype=np.int64)) if file.exists() else None

    def kept(self) -> np.ndarray:
        """Return the positions of the selected documents."""
        return np.flatnonzero(np.fromfile(self.keep, dtype=np.bool_)) if self.keep else np.arange(self.documents)


class PartWriter:
    """A writer of consecutive parts. An exception removes all of them; without `finish` the last one is removed.

    Lines are collected in one reused block of memory, because allocating a new one costs more than the writing.
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
        """`path_of` returns the path of part number n; a part exceeds `max_bytes` only if a single block does."""
        self._path_of, self._data_src, self._max_bytes = path_of, data_src, max_bytes
        self._first_gid, self._first_id = first_gid, first_id
        self._extras: dict[str, Callable[[str], bytes]] = {}
        if rules.exact_duplicates:
            self._extras[".keys"] = content_key
        if rules.near_duplicates is not None:
            self._extras[".signatures"] = lambda content: signature(content).tobytes()
        self.parts: list[Part] = []
        self._part_documents = 0  # without the current block
        self._lengths, self._text_lengths = array("I"), array("I")  # of the current block
        self._blocks = {suffix: BytesIO() for suffix in (".lines", *self._extras)}

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts) + self._part_documents + len(self._lengths)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts) + self._files[".lines"].size + self._blocks[".lines"].tell()

    def __enter__(self) -> "PartWriter":
        self._open_part()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._open_files.__exit__(kind, error, trace)
        if kind is not None:
            for part in self.parts:
                for suffix in (".lines", ".lengths", ".texts", *self._extras):
                    part.file(suffix).unlink(missing_ok=True)

    def write(self, drafts: Iterable[Draft]) -> None:
        """Write all drafts. This loop is performance-critical, so it takes them in one call."""
        add_line, add_length = self._blocks[".lines"].write, self._lengths.append
        add_text_length = self._text_lengths.append
        extras = [(function, self._blocks[suffix]) for suffix, function in self._extras.items()]
        gid, number, data_src = self._first_gid, self._first_id, self._data_src
        block_bytes = 0
        for draft in drafts:
            size = add_line(record_line(gid, number, data_src, draft))
            add_length(size)
            content = draft.content
            add_text_length(len(content) if content.isascii() else len(content.encode("utf-8", "surrogatepass")))
            gid += 1
            number += 1
            for extra, block in extras:
                block.write(extra(content))
            block_bytes += size
            if block_bytes >= BLOCK_BYTES:
                self._write_block()
                block_bytes = 0
        self._write_block()

    def finish(self) -> None:
        """Give the files of the last part their final names. Call it after `write`."""
        part, first_id = self._path_of(len(self.parts)), self._first_id + sum(part.documents for part in self.parts)
        for suffix, file in self._files.items():
            file.finish(part.with_suffix(suffix))
        self._open_files.close()
        lines = self._files[".lines"]
        self.parts.append(Part(str(part), first_id, self._part_documents, lines.size, lines.sha256))
        self._part_documents = 0

    def _open_part(self) -> None:
        path, self._open_files = self._path_of(len(self.parts)), ExitStack()
        suffixes = (".lines", ".lengths", ".texts", *self._extras)
        self._files = {name: self._open_files.enter_context(HashedFile(path.with_suffix(name))) for name in suffixes}

    def _write_block(self) -> None:
        part_bytes = self._files[".lines"].size
        if part_bytes and part_bytes + self._blocks[".lines"].tell() > self._max_bytes:
            self.finish()
            self._open_part()
        for suffix, block in self._blocks.items():
            with block.getbuffer()[: block.tell()] as data:
                self._files[suffix].write(data)
            block.seek(0)
        self._files[".lengths"].write(self._lengths.tobytes())
        self._files[".texts"].write(self._text_lengths.tobytes())
        self._part_documents += len(self._lengths)
        del self._lengths[:], self._text_lengths[:]


def record_line(gid: int, number: int, data_src: str, draft: Draft) -> bytes:
    """Return the record as a line of JSON, with the line feed."""
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
    except TypeError:  # integers beyond 64 bits, which only the standard library writes
        return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
