"""Base class of shards, and the errors that all shard readers raise."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from z2all_ds.base.errors import DataError
from z2all_ds.base.storage import Folder, reason
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

    def where(self, record: int) -> str:
        """Return the position of a record for error messages."""
        return f"{self.path}, record {record}"

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "entry": self.entry, "text_field": self.text_field}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


@contextmanager
def explain_read_errors(where: str) -> Iterator[None]:
    """Turn an OSError into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(where, f"the shard cannot be read ({reason(error)})", REBUILD) from error


def size_changed(where: str, size: int, size_before: int) -> DataError:
    rule = f"the shard has {size} bytes and had {size_before} when it was opened"
    return DataError(where, rule, f"Do not change a corpus while a run reads it. {REBUILD}")
