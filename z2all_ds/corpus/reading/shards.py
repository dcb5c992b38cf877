"""Base class of shards, the check of their content, and the errors that all shard readers raise."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from z2all_ds.base.errors import DataError
from z2all_ds.base.storage import Folder, reason
from z2all_ds.corpus.line_index import SCAN_BYTES
from z2all_ds.corpus.manifest import ShardInfo
from z2all_ds.corpus.shard_text import REBUILD


class TextBlock(Protocol):
    """Neighbouring documents, numbered from 0, that can be read in any order and repeatedly."""

    def text(self, number: int) -> str: ...


class Shard(ABC):
    """A file of records. Nothing is read before the first block. Pickling drops everything that was opened."""

    def __init__(self, folder: Folder, entry: ShardInfo, text_field: str) -> None:
        """`entry` comes from the manifest; a file that differs from it is detected when it is opened."""
        self.folder, self.entry, self.text_field = folder, entry, text_field
        self.path = folder.where(entry.path)

    @abstractmethod
    def open_block(self, first: int, end: int) -> TextBlock:
        """Return the records `first` to `end` - 1."""

    @abstractmethod
    def document_sizes(self) -> npt.NDArray[np.integer[Any]]:
        """Return the size of each record in bytes, at least nearly proportional to its text."""

    def where(self, record: int) -> str:
        """Return the position of a record for error messages."""
        return f"{self.path}, record {record}"

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "entry": self.entry, "text_field": self.text_field}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def check_content(folder: Folder, entry: ShardInfo) -> None:
    """Read a whole shard and compare its SHA-256 with the manifest."""
    where, digest = folder.where(entry.path), hashlib.sha256()
    with explain_read_errors(where):
        for chunk in folder.chunks(entry.path, SCAN_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != entry.sha256:
        raise content_changed(where, REBUILD)


@contextmanager
def explain_read_errors(where: str) -> Iterator[None]:
    """Turn an OSError into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(where, f"the shard cannot be read ({reason(error)})", REBUILD) from error


def content_changed(where: str, fix: str) -> DataError:
    return DataError(where, "its SHA-256 differs from the manifest, the content has changed", fix)


def size_changed(where: str, size: int, size_before: int) -> DataError:
    rule = f"the shard has {size} bytes and had {size_before} when it was opened"
    return DataError(where, rule, f"Do not change a corpus while a run reads it. {REBUILD}")
