"""Blocks of a JSON-lines shard, read through the index of its lines.

Opening a block checks that the file is unchanged and reads the offsets of its lines. On disk, each document is then
read separately; in an object store, where every read is a request, the whole block is fetched at once.
"""

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from z2all_ds.base.errors import DataError
from z2all_ds.base.storage import Folder, Stamp
from z2all_ds.corpus.line_index import LineIndex, Offsets, build_index, load_or_build_index
from z2all_ds.corpus.manifest import ShardInfo
from z2all_ds.corpus.reading.shards import Shard, TextBlock, explain_read_errors, size_changed
from z2all_ds.corpus.shard_text import REBUILD, text_of_line


class JsonlShard(Shard):
    """A shard with one record per line."""

    def __init__(self, folder: Folder, entry: ShardInfo, text_field: str) -> None:
        super().__init__(folder, entry, text_field)
        self._index: LineIndex | None = None
        self._lock = threading.Lock()

    def open_block(self, first: int, end: int) -> TextBlock:
        return Lines(self, first, *self._offsets(first, end))

    def document_sizes(self) -> npt.NDArray[np.uint64]:
        return np.diff(self._offsets(0, self.entry.documents)[0])

    def _offsets(self, first: int, end: int) -> tuple[Offsets, int]:
        """Return the offsets of these lines and of their end, and the size of the file."""
        where = self.where(first)
        with explain_read_errors(where):
            index = self._current_index(where)
            try:
                offsets = index.offsets(first, end)
            except OSError:  # the index was deleted or damaged; the shard may be intact
                with self._lock:
                    index = self._set_index(build_index, index.stamp, where)
                offsets = index.offsets(first, end)
        return offsets, index.stamp.size

    def read(self, begin: int, end: int, size: int, where: str) -> bytes:
        """Return the bytes `begin` to `end` - 1 of a file that had `size` bytes when it was opened."""
        with explain_read_errors(where):
            data = self.folder.read_range(self.entry.path, begin, end)
            if len(data) != end - begin:
                raise size_changed(where, self.folder.stamp(self.entry.path).size, size)
        return data

    def _current_index(self, where: str) -> LineIndex:
        """Return the index of the file as it is now. Only one thread builds it, others wait."""
        stamp = self.folder.stamp(self.entry.path)
        with self._lock:
            index = self._index
            if index is not None and index.stamp.size != stamp.size:
                raise size_changed(where, stamp.size, index.stamp.size)
            if index is None or index.stamp != stamp:
                index = self._set_index(load_or_build_index, stamp, where)
        return index

    def _set_index(self, load: Callable[[Folder, str, Stamp], LineIndex], stamp: Stamp, where: str) -> LineIndex:
        index = load(self.folder, self.entry.path, stamp)
        found, expected = (index.num_lines, index.stamp.size), (self.entry.documents, self.entry.bytes)
        if found != expected:
            rule = f"the shard has {found[0]} records in {found[1]} bytes and the manifest says "
            raise DataError(where, rule + f"{expected[0]} in {expected[1]}", REBUILD)
        self._index = index
        return index


class Lines:
    """Neighbouring lines of a shard. A line on disk is read on request; lines elsewhere are fetched here at once."""

    def __init__(self, shard: JsonlShard, first: int, offsets: Offsets, size: int) -> None:
        self._shard, self._first, self._size = shard, first, size
        self._offsets = offsets.copy()  # not a view of an index in memory
        self._data: bytes | None = None
        if not shard.folder.is_local:
            self._data = shard.read(int(offsets[0]), int(offsets[-1]), size, shard.where(first))

    def text(self, number: int) -> str:
        shard, begin, end = self._shard, int(self._offsets[number]), int(self._offsets[number + 1])
        where = shard.where(self._first + number)
        if self._data is None:
            line = shard.read(begin, end, self._size, where)
        else:
            start = int(self._offsets[0])
            line = self._data[begin - start : end - start]
        return text_of_line(line, shard.text_field, where)
