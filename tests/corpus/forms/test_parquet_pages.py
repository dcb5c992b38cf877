"""Tests of sizes from page headers: equal for all codecs, and damaged or ambiguous headers are errors."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpus.forms.reading import faults_of, read_all, rows_of, write
from tests.helpers.parquet_footers import varint, with_false_size
from z2all_ds.corpus.forms import ReadLimits
from z2all_ds.corpus.forms.parquet_pages import chunk_bytes

TABLE = pa.table(
    {
        "text": [f"text {n % 50} " * (n % 7) for n in range(3000)],
        "list": [["a" * n, None] for n in range(10)] * 300,
        "number": [None, 1.5, 2.5] * 1000,
    }
)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"use_dictionary": False},
    "dictionary": {},
    "small pages": {"data_page_size": 1, "write_batch_size": 10, "write_page_checksum": True},
    "version 2": {"data_page_version": "2.0"},
    "no statistics": {"write_statistics": False, "row_group_size": 1000},
}


def sizes(options: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the size according to the footer and to the pages for each column chunk."""
    file = io.BytesIO()
    pq.write_table(TABLE, file, **options)
    meta = pq.ParquetFile(file).metadata
    columns = [meta.row_group(group).column(n) for group in range(meta.num_row_groups) for n in range(meta.num_columns)]
    return [(column.total_uncompressed_size, chunk_bytes(file, column)) for column in columns]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_size_of_pages_does_not_depend_on_the_codec(name: str) -> None:
    expected = [pages for _, pages in sizes(OPTIONS[name] | {"compression": "none"})]
    for codec in ("snappy", "zstd", "gzip", "none"):
        found = sizes(OPTIONS[name] | {"compression": codec})
        assert [pages for _, pages in found] == expected
        assert all(0 < pages < footer for footer, pages in found)  # which includes the headers


def test_the_size_of_pages_is_exact() -> None:
    file = io.BytesIO()
    schema = pa.schema([pa.field("n", pa.int64(), nullable=False)])  # no levels in the pages
    pq.write_table(pa.table({"n": list(range(1000))}, schema), file, use_dictionary=False)
    assert chunk_bytes(file, pq.ParquetFile(file).metadata.row_group(0).column(0)) == 8 * 1000


def size_of(data: bytes) -> int:
    column = SimpleNamespace(data_page_offset=0, dictionary_page_offset=None, total_compressed_size=len(data))
    return chunk_bytes(io.BytesIO(data), column)


PAGE = b"\x15\x00\x15\x0a\x15\x04\x00??"  # fields 1 (type 0), 2 (5 bytes), 3 (2 bytes)
OTHER_FIELDS = [
    b"\x15\x01",  # a negative 32-bit integer, such as a checksum
    b"\x14\x04\x16\x04",  # 16 and 64 bits
    b"\x11\x12\x13\xff",  # true, false, a byte
    b"\x17" + bytes(8),
    b"\x18\x03abc",
    b"\x1c\x1c\x15\x0a\x00\x18\x01a\x00",  # a struct of a struct and bytes
    b"\x05\xc8\x01\x00",  # a field with a complete id, here 100
]


def test_all_pages_count_whatever_other_fields_their_headers_have() -> None:
    header = PAGE[:6] + b"".join(OTHER_FIELDS) + b"\x00??"
    assert size_of(PAGE) == 5
    assert size_of(PAGE + header + PAGE) == 15
    assert size_of(b"") == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (PAGE + PAGE[:5], "the file ends in a page header"),
        (b"\x15\x00\x15\x0a\x00", "-1 instead"),  # no field 3
        (b"\x15\x00\x15\x09\x15\x04\x00??", "-5 instead"),
        (b"\x15\x00\x15" + varint(2 * (2**32 + 5)) + b"\x15\x04\x00??", "4294967301 instead"),  # 5 in 32 bits
        (b"\x15\x00\x15\x0a\x15" + varint(2 * (2**32 + 2)) + b"\x00??", "4294967298 instead"),
        (PAGE[:6] + b"\x05" + varint(2 * (2**16 + 2)) + b"\x00\x00??", "65538 instead"),  # field 2 in 16 bits
        (PAGE[:6] + b"\x18" + varint(2**32) + b"\x00??", "4294967296 instead"),
        (PAGE[:6] + b"\x16" + varint(1, 11) + b"\x00??", "more than 10 bytes"),
        (PAGE[:6] + b"\x19\x15\x00\x00??", "a value of type 9"),
        (PAGE[:6] + b"\x1c" * 9 + bytes(10) + b"??", "a value of type 12"),
    ],
)
def test_headers_that_pyarrow_might_read_differently_are_errors(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        size_of(data)


def test_a_footer_with_false_sizes_does_not_hide_a_bomb(tmp_path: Path) -> None:
    table = pa.table({"text": ["short", "x" * 3 * 2**20]})
    path = write(tmp_path, "x.parquet", b"")
    pq.write_table(table, path, compression="zstd", use_dictionary=False, row_group_size=1)
    path.write_bytes(with_false_size(path.read_bytes(), group=1))
    assert pq.read_metadata(path).row_group(1).column(0).total_uncompressed_size == 30
    assert rows_of(read_all(path)) == table.to_pylist()
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        items = read_all(path, limits=ReadLimits(expansion_allowance_bytes=2**20))
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() < 2**20  # the long text was not decompressed
    assert (rows_of(items), faults_of(items)) == ([{"text": "short"}], [("expansion", "x.parquet")])


def test_a_row_group_with_a_damaged_page_header_is_lost(tmp_path: Path) -> None:
    path = write(tmp_path, "x.parquet", b"")
    pq.write_table(TABLE, path, row_group_size=1000)
    data = bytearray(path.read_bytes())
    data[pq.read_metadata(path).row_group(1).column(0).dictionary_page_offset] = 0x19
    path.write_bytes(data)
    items = read_all(path)
    assert rows_of(items) == TABLE.slice(0, 1000).to_pylist() + TABLE.slice(2000).to_pylist()
    assert faults_of(items) == [("row_group", "x.parquet, row 1001")]
    assert [item.detail for _, item in items if not isinstance(item, dict)] == [
        "1,000 rows of row group 2 are lost (invalid page header: a value of type 9)"
    ]
