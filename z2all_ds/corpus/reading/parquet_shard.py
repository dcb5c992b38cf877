"""Blocks of a Parquet shard, read by row groups.

The text column of a row group is decoded completely, and a block keeps a copy of its own rows. Neighbouring blocks are
opened soon after each other, so the last decoded row groups are cached, up to a number of bytes. A row group too large
for that is read page by page up to the wanted rows, which is slow but needs little memory.

A small file can have large texts: its pages are compressed, and rows refer to a dictionary. So the first opening of a
row group reads its texts as references and compares their sizes with the limits of an adoption.
"""

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from io import BufferedReader
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from z2all_ds.base.errors import BadRecordError, DataError
from z2all_ds.base.storage import Folder, Stamp
from z2all_ds.base.storage.folders import RangeFile
from z2all_ds.corpus.forms.parquet_expansion import expanded_bytes, rows_within_limit
from z2all_ds.corpus.forms.parquet_pages import BUFFER_BYTES, chunk_bytes
from z2all_ds.corpus.manifest import ShardInfo
from z2all_ds.corpus.reading.shards import Shard, TextBlock, explain_read_errors, size_changed
from z2all_ds.corpus.shard_check import check_expansion
from z2all_ds.corpus.shard_text import (
    REBUILD,
    REPAIR_OR_SKIP,
    check_text_column,
    one_line,
    open_parquet,
    text_columns,
)

CACHE_BYTES = 256 << 20
LARGE_GROUP_BYTES = 128 << 20
"""Row groups with a larger text column are not decoded completely."""
_FOOTER_BYTES_IN_MEMORY = 4
"""Bytes of memory per byte of a parsed footer, about."""


class BoundedCache:
    """A cache of up to `max_bytes` that drops the least recently used values."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._values: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any) -> Any:
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Any, value: Any, size: int) -> None:
        with self._lock:
            self._bytes += size - self._values.pop(key, (None, 0))[1]
            self._values[key] = value, size
            while self._bytes > self._max_bytes:
                self._bytes -= self._values.popitem(last=False)[1][1]

    def reset(self) -> None:
        """Empties the cache. Needed after a fork, when a thread of the parent may hold the lock."""
        self.__init__(self._max_bytes)  # type: ignore[misc]


_CACHE = BoundedCache(CACHE_BYTES)
os.register_at_fork(after_in_child=_CACHE.reset)


class _Footer(NamedTuple):
    """The metadata of a file with this stamp."""

    stamp: Stamp
    metadata: Any
    first_rows: list[int]
    """First row of each row group, then the number of rows."""
    columns: list[Any]
    """Metadata of the text column per row group."""
    text_bytes: list[int]
    """Uncompressed bytes of the text column per row group; of the texts once it was opened, if they are more."""
    checked: set[int]
    """Row groups whose sizes were compared with the limits."""


class ParquetShard(Shard):
    """A shard with one record per row."""

    def __init__(self, folder: Folder, entry: ShardInfo, text_field: str) -> None:
        super().__init__(folder, entry, text_field)
        self._size: int | None = None  # at the first opening

    def open_block(self, first: int, end: int) -> TextBlock:
        import pyarrow as pa

        footer = self._current_footer(self.where(first))
        parts, row = [], first
        while row < end:
            group = bisect_right(footer.first_rows, row) - 1
            stop = min(end, footer.first_rows[group + 1])
            parts.append(self._rows(footer, group, row, stop))
            row = stop
        return Rows(self, first, pa.concat_arrays(parts))

    def document_sizes(self) -> npt.NDArray[np.int64]:
        """Return the bytes of each text; decodes the text column of the whole file, one row group at a time."""
        import pyarrow.compute as pc

        footer = self._current_footer(self.where(0))
        sizes = [np.zeros(0, dtype=np.int64)]
        for group, (first, end) in enumerate(pairwise(footer.first_rows)):
            if first < end:
                lengths = pc.binary_length(self._rows(footer, group, first, end))
                sizes.append(pc.fill_null(lengths, 0).to_numpy())  # a null is reported when it is read
        return np.concatenate(sizes)

    def _current_footer(self, where: str) -> _Footer:
        with explain_read_errors(where):
            stamp = self.folder.stamp(self.entry.path)
            if self._size not in (None, stamp.size):
                raise size_changed(where, stamp.size, self._size or 0)
            footer = self._footer(stamp, where)
        self._size = stamp.size
        return footer

    def _footer(self, stamp: Stamp, where: str) -> _Footer:
        key = (self.path, stamp, self.text_field)
        footer = _CACHE.get(key)
        if footer is None:
            file = open_parquet(self.folder, self.entry.path, stamp.size, where)
            metadata = file.metadata
            check_text_column(file, self.text_field, where)
            counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            if sum(counts) != self.entry.documents:
                rule = f"the shard has {sum(counts)} records and the manifest says {self.entry.documents}"
                raise DataError(where, rule, REBUILD)
            columns = text_columns(metadata, self.text_field)
            sizes = [column.total_uncompressed_size for column in columns]
            footer = _Footer(stamp, metadata, [0, *accumulate(counts)], columns, sizes, set())
            _CACHE.put(key, footer, metadata.serialized_size * _FOOTER_BYTES_IN_MEMORY)
        return footer

    def _rows(self, footer: _Footer, group: int, first: int, end: int) -> Any:
        """Return a copy of the texts of rows `first` to `end` - 1 of one row group."""
        import pyarrow as pa

        begin, stop = first - footer.first_rows[group], end - footer.first_rows[group]
        where = self.where(first)
        with explain_read_errors(where):
            try:
                texts = self._whole_group(footer, group, where)
                if texts is None:
                    return self._rows_of_large_group(footer, group, begin, stop, where)
                return _copy_of(texts, begin, stop)
            except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: a damaged page header
                size = self.folder.stamp(self.entry.path).size
                if size != footer.stamp.size:
                    raise size_changed(where, size, footer.stamp.size) from error
                rule = f"row group {group} of the shard cannot be read ({one_line(error)})"
                raise DataError(where, rule, REBUILD) from error

    def _whole_group(self, footer: _Footer, group: int, where: str) -> Any:
        """Return all texts of a row group; None if they are too large."""
        key = (self.path, footer.stamp, self.text_field, group)
        texts = _CACHE.get(key)
        if texts is None and footer.text_bytes[group] <= LARGE_GROUP_BYTES:
            options = {} if group in footer.checked else {"read_dictionary": [self.text_field]}
            file = self._open(footer, group, where, **options)
            column = file.read_row_group(group, [self.text_field], use_threads=False).column(0)
            if group not in footer.checked:
                text_bytes = sum(map(expanded_bytes, column.chunks))
                check_expansion(where, text_bytes, footer.stamp.size)
                footer.text_bytes[group] = max(text_bytes, footer.text_bytes[group])
                footer.checked.add(group)
                if text_bytes > LARGE_GROUP_BYTES:
                    return None
            texts = _as_large_texts(column)
            _CACHE.put(key, texts, texts.nbytes)
        return texts

    def _rows_of_large_group(self, footer: _Footer, group: int, begin: int, stop: int, where: str) -> Any:
        import pyarrow as pa

        parts, row, text_bytes, fields = [], 0, 0, [self.text_field]
        file = self._open(footer, group, where)
        footer.checked.add(group)
        most_rows = rows_within_limit(file, self._open(footer, group, where, read_dictionary=fields), group, fields)
        for batch in file.iter_batches(max(1, min(stop - begin, most_rows)), [group], fields, use_threads=False):
            if row + batch.num_rows > begin:
                texts = _as_large_texts(pa.chunked_array([batch.column(0)]))
                parts.append(_copy_of(texts, max(0, begin - row), min(batch.num_rows, stop - row)))
                text_bytes += parts[-1].nbytes
                check_expansion(where, text_bytes, footer.stamp.size)
            row += batch.num_rows
            if row >= stop:
                break
        return pa.concat_arrays(parts)

    def _open(self, footer: _Footer, group: int, where: str, **options: Any) -> Any:
        """Open the file to read a row group; the first time, raise if its pages are too large."""
        path, size = self.entry.path, footer.stamp.size
        if group in footer.checked:
            return open_parquet(self.folder, path, size, where, footer.metadata, **options)
        column = footer.columns[group]
        # If the column fits into the buffer, its pages are read from it after their headers, in one request.
        compressed = min(column.total_compressed_size, size)
        buffer_bytes = compressed if BUFFER_BYTES < compressed <= LARGE_GROUP_BYTES else BUFFER_BYTES
        source = BufferedReader(RangeFile(self.folder, path, size), buffer_bytes)
        file = open_parquet(self.folder, path, size, where, footer.metadata, source, **options)
        check_expansion(where, max(column.total_uncompressed_size, chunk_bytes(source, column)), size)
        return file


class Rows:
    """Neighbouring rows of a shard, in memory."""

    def __init__(self, shard: ParquetShard, first: int, texts: Any) -> None:
        self._shard, self._first, self._texts = shard, first, texts

    def text(self, number: int) -> str:
        where, text_field = self._shard.where(self._first + number), self._shard.text_field
        try:
            text = self._texts[number].as_py()
        except UnicodeDecodeError as error:
            raise BadRecordError(where, f"`{text_field}` is not UTF-8 ({error})", REPAIR_OR_SKIP) from error
        if text is None:
            raise BadRecordError(where, f"`{text_field}` must be a text and is null", REPAIR_OR_SKIP)
        return str(text)


def _as_large_texts(column: Any) -> Any:
    """Return the texts with 64-bit offsets, because a row group may have more than 2 GiB of text."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.cast(pa.large_string()).combine_chunks()


def _copy_of(texts: Any, begin: int, stop: int) -> Any:
    """Return a copy of some texts. A slice would keep the whole row group in memory."""
    import pyarrow as pa

    return texts.take(pa.array(np.arange(begin, stop)))
