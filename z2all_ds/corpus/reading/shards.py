"""A shard as readers see it, and what all kinds of shards have in common: the place of a record, and broken files."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from z2all_ds.base.errors import DataError
from z2all_ds.base.storage import Folder, reason
from z2all_ds.corpus.manifest import ShardInfo
from z2all_ds.corpus.shard_text import REBUILD

LEAVE_ALONE = f"Leave a corpus alone while a run reads it. {REBUILD}"


class TextBlock(Protocol):
    """Some neighbouring documents, numbered from 0, which can be read in any order and more than once."""

    def text(self, number: int) -> str: ...


class Shard(Protocol):
    """A file of records. Nothing of it is read before the first block. Can be pickled, without what it holds open."""

    def open_block(self, first: int, end: int) -> TextBlock:
        """Records `first` to `end` - 1."""
        ...


class ShardFile:
    """What every kind of raw shard is made from; sent to another process, it starts there with nothing opened."""

    def __init__(self, folder: Folder, entry: ShardInfo, text_field: str) -> None:
        """`entry` is that of the manifest: a shard that is no longer as it says is noticed when it is opened."""
        self.folder, self.entry, self.text_field = folder, entry, text_field
        self.path = folder.where(entry.path)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "entry": self.entry, "text_field": self.text_field}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def place_of(path: str, record: int) -> str:
    """As every message names a record."""
    return f"{path}, record {record}"


@contextmanager
def read_errors_named(where: str) -> Iterator[None]:
    """A file that is gone or cannot be read becomes a DataError."""
    try:
        yield
    except OSError as error:
        raise cannot_be_read(where, error) from error


def cannot_be_read(where: str, error: OSError) -> DataError:
    return DataError(where, f"the shard cannot be read ({reason(error)})", REBUILD)


def size_changed(where: str, size: int, size_before: int) -> DataError:
    return DataError(where, f"the shard has {size} bytes and had {size_before} when it was opened", LEAVE_ALONE)
