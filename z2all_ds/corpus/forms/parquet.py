"""Reader of Parquet: rows in small batches, so that a row group of gigabytes needs no more memory than a small one.

A row group that cannot be read costs that row group; the others are still read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.parquet_values import column_values
from z2all_ds.corpus.forms.slices import Advance, ReadLimits, Row
from z2all_ds.corpus.forms.streams import os_fault

MAGIC = b"PAR1"
BATCH_BYTES = 2 * 2**20
"""Smaller ones save no memory, larger ones no time."""
MAX_BATCH_ROWS = 1024
"""Larger batches are not faster: 100 us a batch are nothing against 1,024 rows."""
PROBE_ROWS = 16
COLUMN_BUFFER_BYTES = 2**20
"""With a buffer a column is read page by page; without one pyarrow loads a row group's whole column."""


def open_parquet(file: Path | IO[bytes]) -> Any:
    """pyarrow's ParquetFile, set to use little memory."""
    import pyarrow.parquet as pq

    source = str(file) if isinstance(file, Path) else file
    return pq.ParquetFile(source, pre_buffer=False, buffer_size=COLUMN_BUFFER_BYTES, page_checksum_verification=True)


class ParquetReader:
    """Row groups `start` to `stop` of one file."""

    def __init__(
        self,
        file: Path | IO[bytes],
        name: str,
        limits: ReadLimits,
        advance: Advance,
        *,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        self._file, self._name, self._limits, self._advance = file, name, limits, advance
        self._start, self._stop = start, stop
        self._place = ""

    def where(self) -> str:
        return self._name + self._place

    def __iter__(self) -> Iterator[Row | Fault]:
        import pyarrow as pa

        try:
            head, tail, size = _ends(self._file)
        except OSError as error:
            yield os_fault(error).fault
            return
        if size == 0:
            yield Fault("empty_file", "no bytes in it")
            return
        if head == MAGIC and tail != MAGIC:
            yield Fault("truncated", "a Parquet file without its end, where the table of contents is")
            return
        try:
            table = open_parquet(self._file)
        except (pa.ArrowException, OSError) as error:
            yield Fault("container", f"no readable Parquet file ({_one_line(error)})")
            return
        with table:
            groups = table.metadata.num_row_groups
            stop = groups if self._stop is None else min(self._stop, groups)
            rows_before = sum(table.metadata.row_group(group).num_rows for group in range(min(self._start, stop)))
            for group in range(self._start, stop):
                yield from self._row_group(table, group, rows_before)
                rows_before += table.metadata.row_group(group).num_rows

    def _row_group(self, table: Any, group: int, rows_before: int) -> Iterator[Row | Fault]:
        import pyarrow as pa

        meta = table.metadata.row_group(group)
        bytes_on_disk = sum(meta.column(number).total_compressed_size for number in range(meta.num_columns))
        bytes_told, done = 0, 0
        batches: Any = None
        while True:
            try:
                if batches is None:
                    batch_rows = _rows_per_batch(table, group)
                    batches = table.iter_batches(batch_size=batch_rows, row_groups=[group], use_threads=False)
                batch = next(batches, None)
                if batch is None:
                    break
                names = batch.schema.names
                columns = [column_values(name, column) for name, column in zip(names, batch.columns, strict=True)]
            except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
                self._place = f", row {rows_before + done + 1}"
                lost = f"{meta.num_rows - done:,} rows of row group {group + 1} are lost"
                yield Fault("row_group", f"{lost} ({_one_line(error)})")
                break
            too_long = self._long_rows(batch, columns)
            faults = {number: fault for _, found in columns for number, fault in found.items()} | too_long
            number_of_rows = batch.num_rows
            del batch
            for number, values in enumerate(zip(*(values for values, _ in columns), strict=True)):
                self._place = f", row {rows_before + done + number + 1}"
                yield faults[number] if number in faults else dict(zip(names, values, strict=True))
            done += number_of_rows
            reached = bytes_on_disk * done // max(1, meta.num_rows)
            self._advance(reached - bytes_told)
            bytes_told = reached
        self._advance(bytes_on_disk - bytes_told)

    def _long_rows(self, batch: Any, columns: list[tuple[list[Any], dict[int, Fault]]]) -> dict[int, Fault]:
        limit = self._limits.max_record_bytes
        if batch.nbytes <= limit:
            return {}
        faults = {}
        for number in range(batch.num_rows):
            size = sum(len(values[number]) for values, _ in columns if isinstance(values[number], str))
            if size > limit:
                faults[number] = Fault("too_long", f"{size:,} characters; the limit is {limit:,}")
        return faults


def _rows_per_batch(table: Any, group: int) -> int:
    """By the first rows: a text that comes a million times is stored once, so the file's own sizes tell too little."""
    probe = next(table.iter_batches(batch_size=PROBE_ROWS, row_groups=[group], use_threads=False), None)
    if probe is None or probe.num_rows < PROBE_ROWS:
        return PROBE_ROWS
    meta = table.metadata.row_group(group)
    bytes_per_row = max(probe.nbytes / probe.num_rows, meta.total_byte_size / max(1, meta.num_rows), 1)
    return max(1, min(MAX_BATCH_ROWS, int(BATCH_BYTES / bytes_per_row)))


def _ends(file: Path | IO[bytes]) -> tuple[bytes, bytes, int]:
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return _ends(opened)
    head = (file.seek(0), file.read(4))[1]
    size = file.seek(0, 2)
    tail = (file.seek(max(0, size - 4)), file.read(4))[1]
    file.seek(0)
    return head, tail, size


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
