"""Reads a whole file of an adopted corpus: its hash, its lines, and the text of every record.

Texts of Parquet files stay references to their dictionary, so a small file cannot take much memory here.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedReader, BytesIO
from typing import Any

from z2all_ds.base.errors import BadRecordError, DataError
from z2all_ds.base.storage import Folder
from z2all_ds.base.storage.folders import RangeFile
from z2all_ds.corpus.forms.parquet_expansion import expanded_bytes
from z2all_ds.corpus.forms.parquet_pages import BUFFER_BYTES, chunk_bytes
from z2all_ds.corpus.forms.slices import ReadLimits
from z2all_ds.corpus.line_index import SCAN_BYTES, LineScan
from z2all_ds.corpus.shard_text import (
    check_text_column,
    open_parquet,
    parquet_errors,
    text_columns,
    text_of_line,
)

MAX_SHOWN = 10
DAMAGE = {
    "replaced": "contain U+FFFD, which stands for an undecodable character",
    "nul": "contain a NUL character",
    "empty": "have no content",
}
"""Kinds of damaged text in valid records."""


@dataclass
class ShardCheck:
    """What was found in a file. Small, except for the offsets of its lines."""

    documents: int = 0
    bytes: int = 0
    text_bytes: int = 0
    """UTF-8 bytes of all valid texts."""
    sha256: str = ""
    bad: int = 0
    """Records without a valid text."""
    problems: list[str] = field(default_factory=list)
    """The first bad records, as `record N: reason`."""
    damage: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Kind of DAMAGE -> (number of documents, first record)."""
    scan: LineScan = field(default_factory=LineScan)
    """The lines of a JSON Lines file."""
    text_column_bytes: list[int] = field(default_factory=list)
    """Bytes of the text column in each row group of a Parquet file."""

    def add_text(self, text: str, record: int) -> None:
        self.text_bytes += len(text) if text.isascii() else len(text.encode())
        for kind in damage_of(text):
            count, first = self.damage.get(kind, (0, record))
            self.damage[kind] = (count + 1, first)

    def add_bad(self, record: int, rule: str, count: int = 1) -> None:
        self.bad += count
        if len(self.problems) < MAX_SHOWN:
            self.problems.append(f"record {record}: {rule}")


def damage_of(text: str) -> list[str]:
    tests = {"replaced": "\ufffd" in text, "nul": "\0" in text, "empty": not text or text.isspace()}
    return [kind for kind, is_found in tests.items() if is_found]


def is_parquet(name: str) -> bool:
    return name.lower().endswith(".parquet")


def check_shard(folder: Folder, name: str, text_field: str, size: int) -> ShardCheck:
    """Read the file completely. Bad records are counted; a file that cannot be read at all is an error."""
    found, digest = ShardCheck(), hashlib.sha256()
    rest = b""
    while chunk := folder.read_range(name, found.bytes, found.bytes + SCAN_BYTES):
        digest.update(chunk)
        found.bytes += len(chunk)
        if not is_parquet(name):
            found.scan.feed(chunk)
            whole, line_feed, after = chunk.rpartition(b"\n")
            if line_feed:
                _check_lines(found, rest + whole + line_feed, text_field)
                rest = after
            else:
                rest += chunk
    _check_lines(found, rest, text_field)
    found.sha256 = digest.hexdigest()
    if is_parquet(name):
        with parquet_errors(folder.where(name), "Restore or remove it."):
            _check_rows(found, folder, name, text_field, size)
    return found


def _check_lines(found: ShardCheck, lines: bytes, text_field: str) -> None:
    for line in BytesIO(lines):
        try:
            found.add_text(text_of_line(line, text_field, ""), found.documents)
        except BadRecordError as error:
            found.add_bad(found.documents, error.rule)
        found.documents += 1


def _check_rows(found: ShardCheck, folder: Folder, name: str, text_field: str, size: int) -> None:
    where = folder.where(name)
    file = open_parquet(folder, name, size, where, read_dictionary=[text_field])
    check_text_column(file, text_field, where)
    columns = text_columns(file.metadata, text_field)
    with BufferedReader(RangeFile(folder, name, size), BUFFER_BYTES) as pages:  # a footer may understate the size
        found.text_column_bytes = [max(one.total_uncompressed_size, chunk_bytes(pages, one)) for one in columns]
    for text_bytes in found.text_column_bytes:
        check_expansion(where, text_bytes, size)
    for column in _column_batches(file, text_field):
        found.text_bytes += expanded_bytes(column)
        check_expansion(where, found.text_bytes, size)
        if column.null_count:
            nulls = column.is_null().to_pylist()
            found.add_bad(found.documents + nulls.index(True), f"`{text_field}` is null", column.null_count)
        try:
            column.dictionary.validate(full=True)
        except ValueError as error:  # ArrowInvalid: not UTF-8
            found.add_bad(found.documents, f"`{text_field}` is not UTF-8 here or in one of the next records ({error})")
        else:
            _count_damage(found, column)
        found.documents += len(column)


def _count_damage(found: ShardCheck, column: Any) -> None:
    """Look for damage in each text of the dictionary, and count the rows that refer to it."""
    import pyarrow.compute as pc

    texts = column.dictionary
    tests = {
        "replaced": pc.match_substring(texts, "\ufffd"),
        "nul": pc.match_substring(texts, "\0"),
        "empty": pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(texts)), 0),
    }
    for kind, is_damaged in tests.items():
        if pc.any(is_damaged).as_py():
            rows = pc.fill_null(pc.take(is_damaged, column.indices), False).to_pylist()
            if any(rows):
                count, first = found.damage.get(kind, (0, found.documents + rows.index(True)))
                found.damage[kind] = (count + sum(rows), first)


def _column_batches(file: Any, text_field: str) -> Iterator[Any]:
    for group in range(file.metadata.num_row_groups):
        for batch in file.iter_batches(1024, row_groups=[group], columns=[text_field], use_threads=False):
            column = batch.column(0)
            yield column if hasattr(column, "dictionary") else column.dictionary_encode()


def check_expansion(where: str, text_bytes: int, size: int) -> None:
    """Raise if a Parquet file of `size` bytes expands to more text than `ReadLimits` allow."""
    limits = ReadLimits()
    if text_bytes > max(limits.expansion_allowance_bytes, int(limits.max_expansion * size)):
        rule = f"expands to {text_bytes:,} bytes of text or more from {size:,}"
        raise DataError(where, rule, "Write it as JSON Lines yourself if you trust it.")
