"""Reader of Parquet files in small batches, so that memory does not depend on the size of row groups.

After an unreadable row group the next ones are still read. Values become plain JSON values: times as ISO text, decimals
as text, bytes as the text they encode.
"""

import base64
import datetime
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms import parquet_expansion
from z2all_ds.corpus.forms.detect import PARQUET_MAGIC
from z2all_ds.corpus.forms.json_rows import BadValue, utf8_fault
from z2all_ds.corpus.forms.slices import Advance, ReadLimits, Row
from z2all_ds.corpus.forms.streams import ExpansionGuard, read_failure
from z2all_ds.corpus.shard_text import one_line

BATCH_BYTES = 2 * 2**20
"""Smaller batches do not save memory, larger ones do not save time."""
MAX_BATCH_ROWS = 1024
"""Larger batches are not faster: the overhead of 100 us per batch is small compared with 1,024 rows."""
PROBE_ROWS = 16
COLUMN_BUFFER_BYTES = 2**20
"""With a buffer pyarrow reads a column page by page, without one the whole column of a row group."""


def open_parquet(file: Path | IO[bytes]) -> Any:
    """Return a pyarrow ParquetFile with options for low memory use."""
    import pyarrow.parquet as pq

    source = str(file) if isinstance(file, Path) else file
    options: dict[str, Any] = {"pre_buffer": False, "buffer_size": COLUMN_BUFFER_BYTES}
    options["page_checksum_verification"] = True
    table = pq.ParquetFile(source, **options)
    if lists := parquet_expansion.dictionary_columns(table, in_lists=True):
        table = pq.ParquetFile(source, metadata=table.metadata, read_dictionary=lists, **options)
    return table


class ParquetReader:
    """Reads some row groups of one file."""

    def __init__(
        self,
        file: Path | IO[bytes],
        name: str,
        limits: ReadLimits,
        guard: ExpansionGuard,
        advance: Advance,
        groups: slice,
    ) -> None:
        self._file, self._name, self._limits, self._guard = file, name, limits, guard
        self._advance, self._groups = advance, groups
        self._position = ""

    def where(self) -> str:
        return self._name + self._position

    def __iter__(self) -> Iterator[Row | Fault]:
        try:
            table = open_parquet(self._file)
        except Exception as error:  # pyarrow raises many types
            yield _open_fault(self._file, error)
            return
        with table:
            rows_before = 0
            wanted = range(table.metadata.num_row_groups)[self._groups]
            for group in range(wanted.stop):
                if group in wanted:
                    yield from self._row_group(table, group, rows_before)
                rows_before += table.metadata.row_group(group).num_rows

    def _texts(self, table: Any) -> Any:
        """Return the same file with texts as references to their dictionaries, or None if it has none."""
        import pyarrow.parquet as pq

        columns = parquet_expansion.dictionary_columns(table, in_lists=False)
        source = str(self._file) if isinstance(self._file, Path) else self._file
        return pq.ParquetFile(source, metadata=table.metadata, read_dictionary=columns) if columns else None

    def _row_group(self, table: Any, group: int, rows_before: int) -> Iterator[Row | Fault]:
        import pyarrow as pa

        meta = table.metadata.row_group(group)
        bytes_on_disk = sum(meta.column(number).total_compressed_size for number in range(meta.num_columns))
        bytes_counted, done = 0, 0
        batches = _batches(table, self._file, self._texts, group, self._limits.max_record_bytes, self._guard)
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError, ValueError, LookupError, OverflowError, MemoryError) as error:
                self._position = f", row {rows_before + done + 1}"
                lost = f"{meta.num_rows - done:,} rows of row group {group + 1} are lost"
                yield Fault("row_group", f"{lost} ({one_line(error)})")
                break
            if batch is None:
                break
            names, columns, faults = batch
            for number, values in enumerate(zip(*columns, strict=True)):
                self._position = f", row {rows_before + done + number + 1}"
                yield faults[number] if number in faults else dict(zip(names, values, strict=True))
            done += len(columns[0]) if columns else 0
            reached = bytes_on_disk * done // max(1, meta.num_rows)
            self._advance(reached - bytes_counted)
            bytes_counted = reached
        self._advance(bytes_on_disk - bytes_counted)


def _batches(
    table: Any, file: Path | IO[bytes], texts_of: Callable[[Any], Any], group: int, limit: int, guard: ExpansionGuard
) -> Iterator[tuple[list[str], list[list[Any]], dict[int, Fault]]]:
    """Yield (column names, values per column, faults by row) for each batch of a row group."""
    guard.require(parquet_expansion.group_bytes(table.metadata.row_group(group), file))
    most_rows = parquet_expansion.rows_within_limit(table, texts_of(table), group)
    for batch in table.iter_batches(_rows_per_batch(table, group, most_rows), row_groups=[group], use_threads=False):
        names, size = batch.schema.names, sum(map(parquet_expansion.expanded_bytes, batch.columns))
        guard.count(max(size, batch.num_rows * batch.num_columns))  # nulls take no bytes, but time
        faults: dict[int, Fault] = {}
        columns = [_column_values(name, column, faults) for name, column in zip(names, batch.columns, strict=True)]
        del batch
        if size > limit:
            for number, values in enumerate(zip(*columns, strict=True)):
                if (length := sum(len(value) for value in values if isinstance(value, str))) > limit:
                    faults[number] = Fault("too_long", f"{length:,} characters; the limit is {limit:,}")
        yield names, columns, faults


def _rows_per_batch(table: Any, group: int, most_rows: int) -> int:
    """Estimate the batch size from the first rows: repeated texts are stored once, so file sizes are too small."""
    probe_rows = min(PROBE_ROWS, most_rows)
    probe = next(table.iter_batches(batch_size=probe_rows, row_groups=[group], use_threads=False), None)
    if probe is None or probe.num_rows < PROBE_ROWS:
        return probe_rows
    meta = table.metadata.row_group(group)
    bytes_per_row = max(probe.nbytes / probe.num_rows, meta.total_byte_size / max(1, meta.num_rows), 1)
    return max(1, min(MAX_BATCH_ROWS, most_rows, int(BATCH_BYTES / bytes_per_row)))


def _open_fault(file: Path | IO[bytes], error: Exception) -> Fault:
    """Return the reason why a file cannot be opened."""
    try:
        with file.open("rb") if isinstance(file, Path) else file as opened:
            opened.seek(0)
            head, size = opened.read(4), opened.seek(0, 2)
            opened.seek(max(0, size - 4))
            tail = opened.read(4)
    except OSError as os_error:
        return read_failure(os_error).fault
    if size == 0:
        return Fault("empty_file", "0 bytes")
    if head == PARQUET_MAGIC != tail:
        return Fault("truncated", "the footer of the Parquet file is missing")
    return Fault("container", f"not a readable Parquet file ({one_line(error)})")


def _column_values(name: str, column: Any, faults: dict[int, Fault]) -> list[Any]:
    """Return one column of a batch as plain values; add invalid values to `faults` by row."""
    import pyarrow as pa
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_null(kind):
        return column.to_pylist()
    if types.is_string(kind) or types.is_large_string(kind):
        try:
            texts: list[Any] = column.to_pylist()
        except UnicodeDecodeError:  # read as bytes, so that each value is checked separately
            column = column.cast(pa.large_binary() if types.is_large_string(kind) else pa.binary())
        else:
            faults |= {n: _nul(name).fault for n, text in enumerate(texts) if text is not None and "\0" in text}
            return texts
    if types.is_timestamp(kind):
        # Conversion of nanoseconds to Python objects needs pandas; documents do not need them.
        column = column.cast(pa.timestamp("us", kind.tz), safe=False)
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError):
        if not types.is_temporal(kind):
            raise
        values = column.cast(pa.string()).to_pylist()  # years outside the range of datetime
    for number, value in enumerate(values):
        try:
            values[number] = _plain(value, name, inside=False)
        except BadValue as bad:
            faults[number] = bad.fault
    return values


def _nul(name: str) -> BadValue:
    return BadValue("nul", f"NUL character in column {name!r}")


def _plain(value: Any, name: str, inside: bool) -> Any:
    """Return a JSON value. Bytes `inside` a list or struct that are not UTF-8, often images, become Base64."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        if "\0" in value:
            raise _nul(name)
        return value
    if isinstance(value, bytes):
        try:
            return _plain(value.decode("utf-8"), name, inside)
        except UnicodeDecodeError as error:
            if inside:
                return base64.b64encode(value).decode("ascii")
            fault = utf8_fault(error)
            raise BadValue(fault.kind, f"column {name!r}: {fault.detail}") from None
    if isinstance(value, dict):
        return {str(_plain(key, name, True)): _plain(inner, name, True) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, name, True) for inner in value]
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    return str(value)  # decimals and other types
