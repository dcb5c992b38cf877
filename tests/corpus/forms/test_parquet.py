"""Tests of reading Parquet: plain JSON values, small batches, and broken row groups that do not affect others."""

import datetime
import io
import json
import subprocess
import sys
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpus.forms.reading import details_of, faults_of, read_all, rows_of, write
from z2all_ds.base.errors import DataError
from z2all_ds.corpus.forms import ReadLimits, open_slice, plan_slices


def parquet(table: pa.Table, **options: object) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return file.getvalue()


TEXTS = pa.table({"id": list(range(1000)), "text": [f"text {n} " + str(n**20) * 5 for n in range(1000)]})


def test_values_are_converted_to_plain_json(tmp_path: Path) -> None:
    moment = datetime.datetime(2020, 1, 2, 3, 4, 5, 678)
    table = pa.table(
        {
            "text": ["中", None],
            "large": pa.array(["a", "b"], pa.large_string()),
            "dictionary": pa.array(["x", "x"]).dictionary_encode(),
            "bytes": pa.array(["é".encode(), b"y"]),
            "int": [2**62, None],
            "float": [1.5, float("nan")],
            "bool": [True, False],
            "time": pa.array([moment, None], pa.timestamp("us")),
            "nanos": pa.array([1_500_000_000_123_456_789, 0], pa.timestamp("ns", "UTC")),
            "far": pa.array([2**60, 0], pa.timestamp("us")),
            "date": pa.array([moment.date(), None]),
            "decimal": pa.array([Decimal("1.50"), None]),
            "list": [["a", "b"], []],
            "struct": [{"b": b"\xff\xd8", "t": moment, "n": [1]}, None],
            "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
            "nothing": pa.nulls(2),
        }
    )
    items = read_all(write(tmp_path, "x.parquet", parquet(table)))
    assert not faults_of(items)
    first, second = json.loads(json.dumps(rows_of(items), allow_nan=False))
    assert first.pop("far")
    assert first == {
        "text": "中",
        "large": "a",
        "dictionary": "x",
        "bytes": "é",
        "int": 2**62,
        "float": 1.5,
        "bool": True,
        "time": "2020-01-02T03:04:05.000678",
        "nanos": "2017-07-14T02:40:00.123456+00:00",
        "date": "2020-01-02",
        "decimal": "1.50",
        "list": ["a", "b"],
        "struct": {"b": "/9g=", "t": "2020-01-02T03:04:05.000678", "n": [1]},
        "map": [["k", 1]],
        "nothing": None,
    }
    assert second["text"] is None and second["float"] is None and second["list"] == []


def test_invalid_text_affects_only_its_row(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"\xff", None, b"a\0b"])
    as_text = pa.Array.from_buffers(pa.string(), 4, raw.buffers())
    for column in (raw, as_text):
        items = read_all(write(tmp_path, "x.parquet", parquet(pa.table({"text": column}))))
        assert rows_of(items) == [{"text": "good"}, {"text": None}]
        assert faults_of(items) == [("utf8", "x.parquet, row 2"), ("nul", "x.parquet, row 4")]
        assert "'text'" in details_of(items)


def test_slices_consist_of_whole_row_groups(tmp_path: Path) -> None:
    path = write(tmp_path, "x.parquet", parquet(TEXTS, row_group_size=100))
    wanted = TEXTS.to_pylist()
    for slice_bytes, count in ((1, 10), (2**30, 1)):
        pieces = plan_slices(path, "parquet", slice_bytes)
        assert len(pieces) == count
        items = read_all(path, "parquet", slice_bytes=slice_bytes)
        assert rows_of(items) == wanted
        assert [where.rpartition(" ")[2] for where, _ in items] == [str(n + 1) for n in range(1000)]


@pytest.mark.parametrize("compression", ["snappy", "zstd", "gzip"])
def test_a_corrupt_row_group_does_not_affect_other_row_groups(tmp_path: Path, compression: str) -> None:
    data = bytearray(parquet(TEXTS, row_group_size=100, compression=compression))
    column = pq.ParquetFile(io.BytesIO(bytes(data))).metadata.row_group(3).column(1)
    middle = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size // 2
    data[middle : middle + 200] = bytes(255 - byte for byte in data[middle : middle + 200])
    items = read_all(write(tmp_path, "x.parquet", bytes(data)))
    assert {kind for kind, _ in faults_of(items)} <= {"row_group", "utf8", "nul"}
    assert faults_of(items)[0][0] == "row_group"
    good = [row for row in rows_of(items) if not 300 <= row["id"] < 400]
    assert good == [row for row in TEXTS.to_pylist() if not 300 <= row["id"] < 400]


def test_page_checksums_are_verified(tmp_path: Path) -> None:
    data = parquet(TEXTS, compression="none", write_page_checksum=True, use_dictionary=False)
    items = read_all(write(tmp_path, "x.parquet", data.replace(b"text 500 ", b"tixt 500 ")))
    assert [kind for kind, _ in faults_of(items)] == ["row_group"]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "empty_file"),
        (b"hello", "container"),
        (b"PAR1", "container"),
        (parquet(TEXTS)[:-100], "truncated"),
        (b"PAR1" + b"x" * 100 + b"PAR1", "container"),
    ],
)
def test_files_that_are_not_parquet_are_faults(tmp_path: Path, data: bytes, kind: str) -> None:
    assert faults_of(read_all(write(tmp_path, "x.parquet", data))) == [(kind, "x.parquet")]


def test_repeated_texts_are_not_expanded_in_memory(tmp_path: Path) -> None:
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int32()), pa.array(["x" * 2**20]))
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": texts}), path, store_schema=False)
    (piece,) = plan_slices(path, "auto")
    pa.default_memory_pool().release_unused()
    with open_slice(piece, ReadLimits(), lambda _: None) as reader:
        next(iter(reader))
        assert pa.total_allocated_bytes() < 2**26
    assert path.stat().st_size < 2**20


def test_rows_that_are_too_long_are_skipped(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b" * 5000, "c"]})
    items = read_all(write(tmp_path, "x.parquet", parquet(table)), limits=ReadLimits(max_record_bytes=1000))
    assert rows_of(items) == [{"text": "a"}, {"text": "c"}]
    assert faults_of(items) == [("too_long", "x.parquet, row 2")]


def test_reading_a_large_row_group_uses_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    code = f"""if True:
        import os, pyarrow as pa, pyarrow.parquet as pq
        texts = [os.urandom(5000).hex() for _ in range(15_000)]
        pq.write_table(pa.table({{"text": texts}}), {str(path)!r}, use_dictionary=False, compression="none")
    """
    subprocess.run([sys.executable, "-c", code], check=True)
    code = f"""if True:
        import resource, pyarrow.parquet
        from pathlib import Path
        from z2all_ds.corpus.forms import ReadLimits, open_slice, plan_slices
        (piece,) = plan_slices(Path({str(path)!r}), "auto", 2**40)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with open_slice(piece, ReadLimits(), lambda _: None) as reader:
            assert sum(len(row["text"]) for row in reader) == 150_000_000
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    grown_kib = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    assert grown_kib < 80 * 1024


@pytest.mark.parametrize("kind", ["text", "list", "struct", "pages", "nulls"])
def test_parquet_bombs_are_stopped(tmp_path: Path, kind: str) -> None:
    long = "x" * 100_000
    columns: dict[str, Any] = {
        "text": [None, "short"] * 50 + [long] * 200,
        "list": [[], ["short"], [long] * 200],
        "struct": [{"a": long, "b": long}] * 100,
        "pages": [f"{n:010}" + long for n in range(100)],
        "nulls": pa.nulls(300_000, pa.int8()),
    }
    options = {"use_dictionary": False} if kind == "pages" else {"dictionary_pagesize_limit": 10**9}
    data = parquet(pa.table({"a": pa.array(columns[kind])}), compression="zstd", **options)
    assert len(data) < 50_000
    items = read_all(write(tmp_path, "x.parquet", data), limits=ReadLimits(expansion_allowance_bytes=2**17))
    assert [kind for kind, _ in faults_of(items)] == ["expansion"]
    assert sum(len(str(row["a"])) for row in rows_of(items)) < 10 * 2**20


def test_texts_in_lists_and_dictionaries_are_read_unchanged(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "text": f"q{n % 7}"}] * (n % 3), "tags": {"a": "b"}} for n in range(500)]
    schema = pa.schema(
        [
            ("messages", pa.list_(pa.struct([("role", pa.string()), ("text", pa.string())]))),
            ("tags", pa.struct([("a", pa.string())])),
        ]
    )
    items = read_all(write(tmp_path, "x.parquet", parquet(pa.Table.from_pylist(rows, schema), row_group_size=100)))
    assert rows_of(items) == rows


def test_any_damaged_byte_gives_rows_or_faults(tmp_path: Path) -> None:
    whole = parquet(pa.table({"text": ["one", "two", "three"] * 3}), compression="none", write_statistics=False)
    path, faults = tmp_path / "rows.parquet", set()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x81]) + whole[position + 1 :])
        with suppress(DataError):  # such as an expansion beyond the limit
            faults |= {kind for kind, _ in faults_of(read_all(path, "parquet"))}
    assert {"row_group", "container"} <= faults
