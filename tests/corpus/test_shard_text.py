"""Tests of reading the text of a JSON line and the text column of a Parquet file."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from z2all_ds.base.errors import BadRecordError, DataError
from z2all_ds.base.storage import open_folder
from z2all_ds.corpus.shard_text import check_text_column, open_parquet, text_columns, text_of_line


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"t": "a"}\n', "a"),
        (b'{"t": ""}', ""),
        (b'{"x": 1e999, "t": "b"}\r\n', "b"),
        (b'\xef\xbb\xbf{"t": "c", "x": NaN}\n', "c"),
        ('{"t": "\u2028第一\\n"}\n'.encode(), "\u2028第一\n"),
        (b'{"t": "\\ud83d\\ude00"}', "😀"),
    ],
)
def test_the_text_field_of_a_line_is_returned(line: bytes, text: str) -> None:
    assert text_of_line(line, "t", "x, record 0") == text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"\n", "the line is empty"),
        ('{"t": "a"}\n'.encode("utf-16"), r"the line is not UTF-8 \(it begins with a UTF-16 mark\)"),
        (b"{", "not JSON in UTF-8"),
        (b'{"t": "\xff"}', "not JSON in UTF-8"),
        (b"[" * 100_000, "not JSON in UTF-8"),
        (b"[]", "a record must be a JSON object"),
        (b"{}", "has no field `t`; its fields are: none"),
        (b'{"a": "x", "b": 1}', "has no field `t`; its fields are: a, b"),
        (b'{"t": null}', "`t` must be a string and is NoneType"),
        (b'{"t": ["x"]}', "`t` must be a string and is list"),
        (b'{"t": "x", "x": NaN, "t": "\\udc00"}', "`t` contains half a surrogate pair"),
    ],
)
def test_lines_without_a_valid_text_field_are_refused(line: bytes, words: str) -> None:
    with pytest.raises(BadRecordError, match=f"^x, record 7: .*{words}") as caught:
        text_of_line(line, "t", "x, record 7")
    assert caught.value.fix.endswith("data.on_bad_record=skip in a run, else --on-bad-record skip.")


def test_the_text_column_of_a_parquet_file_is_checked_and_found_in_each_row_group(tmp_path: Path) -> None:
    table = pa.table({"n": [1, 2, 3], "t": ["a", "b", "c"], "list": [["x"], [], ["y"]]})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=2)
    folder = open_folder(tmp_path)
    file = open_parquet(folder, "x.parquet", folder.stamp("x.parquet").size, "x")
    check_text_column(file, "t", "x")
    assert [column.num_values for column in text_columns(file.metadata, "t")] == [2, 1]
    for field, words in (("list", "must contain strings and has type list"), ("z", "its fields are: n, t, list")):
        with pytest.raises(DataError, match=f"^x: .*{words}"):
            check_text_column(file, field, "x")


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"no Parquet at all")
    with pytest.raises(DataError, match=r"^x: not a readable Parquet file"):
        open_parquet(open_folder(tmp_path), "x.parquet", 17, "x")
