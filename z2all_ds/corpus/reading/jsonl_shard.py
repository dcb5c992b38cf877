"""Blocks of a JSON-lines shard, by the index of its lines.

Opening a block costs a look at the file (is it there, is it the one we know?) and one small read of offsets. On disk
each document is then one read; elsewhere, where every read is a request, the block is fetched whole.
"""

import threading

from z2all_ds.base.errors import DataError
from z2all_ds.base.storage import Folder, Stamp
from z2all_ds.corpus.line_index import LineIndex, Offsets, build_index, load_or_build_index
from z2all_ds.corpus.manifest import ShardInfo
from z2all_ds.corpus.reading.shards import (
    ShardFile,
    TextBlock,
    cannot_be_read,
    place_of,
    read_errors_named,
    size_changed,
)
from z2all_ds.corpus.shard_text import REBUILD, text_of_line


class JsonlShard(ShardFile):
    """One record a line."""

    def __init__(self, folder: Folder, entry: ShardInfo, text_field: str) -> None:
        super().__init__(folder, entry, text_field)
        self._index: LineIndex | None = None
        self._lock = threading.Lock()

    def open_block(self, first: int, end: int) -> TextBlock:
        where = place_of(self.path, first)
        with read_errors_named(where):
            index = self._index_now(where)
            try:
                offsets = index.offsets(first, end)
            except OSError:  # the index was deleted or damaged; the shard may be well
                index = self._index_anew(where, index.stamp)
                offsets = index.offsets(first, end)
            if self.folder.is_local:
                return LinesOnDisk(self, first, offsets, index.stamp.size)
            begin, stop = int(offsets[0]), int(offsets[-1])
            data = self.folder.read_range(self.entry.path, begin, stop)
            if len(data) != stop - begin:
                raise size_changed(where, self.folder.stamp(self.entry.path).size, index.stamp.size)
        return LinesInMemory(self, first, offsets, data)

    def _index_now(self, where: str) -> LineIndex:
        """The index of the file as it is now; another thread that wants it too waits for it."""
        stamp = self.folder.stamp(self.entry.path)
        with self._lock:
            index = self._index
            if index is not None and index.stamp.size != stamp.size:
                raise size_changed(where, stamp.size, index.stamp.size)
            if index is None or index.stamp != stamp:
                index = self._index = self._checked(load_or_build_index(self.folder, self.entry.path, stamp), where)
        return index

    def _index_anew(self, where: str, stamp: Stamp) -> LineIndex:
        with self._lock:
            self._index = self._checked(build_index(self.folder, self.entry.path, stamp), where)
            return self._index

    def _checked(self, index: LineIndex, where: str) -> LineIndex:
        found, expected = (index.num_lines, index.stamp.size), (self.entry.documents, self.entry.bytes)
        if found != expected:
            rule = f"the shard has {found[0]} records in {found[1]} bytes and the manifest says "
            raise DataError(where, rule + f"{expected[0]} in {expected[1]}", REBUILD)
        return index


class LinesOnDisk:
    """Some lines of a local shard, each read when it is asked for."""

    def __init__(self, shard: JsonlShard, first: int, offsets: Offsets, size: int) -> None:
        self._shard, self._first, self._size = shard, first, size
        self._offsets = offsets.copy()  # not a view of an index that is kept in memory

    def text(self, number: int) -> str:
        shard, begin, end = self._shard, int(self._offsets[number]), int(self._offsets[number + 1])
        where = place_of(shard.path, self._first + number)
        try:
            line = shard.folder.read_range(shard.entry.path, begin, end)
            if len(line) != end - begin:
                raise size_changed(where, shard.folder.stamp(shard.entry.path).size, self._size)
        except OSError as error:
            raise cannot_be_read(where, error) from error
        return text_of_line(line, shard.text_field, where)


class LinesInMemory:
    """Some lines of a shard elsewhere, fetched in one request."""

    def __init__(self, shard: JsonlShard, first: int, offsets: Offsets, data: bytes) -> None:
        self._path, self._text_field, self._first, self._data = shard.path, shard.text_field, first, data
        self._offsets = offsets - offsets[0]

    def text(self, number: int) -> str:
        line = self._data[int(self._offsets[number]) : int(self._offsets[number + 1])]
        return text_of_line(line, self._text_field, place_of(self._path, self._first + number))
