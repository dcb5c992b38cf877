"""Tests of reading one large JSON array: all rows are read, and a broken element does not affect others."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.forms.reading import details_of, faults_of, read_all, rows_of, write
from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms import ReadLimits, json_array
from z2all_ds.corpus.forms.json_array import JsonArrayReader
from z2all_ds.corpus.forms.streams import Stream

TEXT = st.text(alphabet='ab{}[],:"\\\n \u4e2d\U0001f600', max_size=12)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(TEXT | st.sampled_from(["id", "text"]), VALUE, max_size=4), max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    rows=ROWS,
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
    fill=st.integers(1, 200),
    same_key=st.booleans(),
)
def test_any_array_gives_its_rows(
    rows: list[dict], indent: int | None, ascii_only: bool, fill: int, same_key: bool
) -> None:
    if same_key:
        rows = [{"id": number, **row} for number, row in enumerate(rows)]
    data = json.dumps(rows, indent=indent, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "FILL_BYTES", fill)
        stream = Stream(data[start : start + 7] for start in range(0, len(data), 7))
        reader = JsonArrayReader(stream, "x.json", ReadLimits())
        assert list(reader) == rows


def rows(count: int = 5, size: int = 10) -> list[dict]:
    """Return rows that contain lists of objects, which resemble array elements."""
    return [{"id": n, "talk": [{"role": "a", "text": "x" * size}, {"role": "b", "text": "}, {"}]} for n in range(count)]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ('"id": 3', '"id": 3x', "json"),
        ('"id": 3', '"id": "3', "json"),
        ('"id": 3', '"id": \xff3', "json"),
        ('"id": 3', '"id": NaN', "json"),
        ('"id": 3', '"id": "\\u0000"', "nul"),
        ('"id": 3', '"id": "\0"', "nul"),
    ],
)
@pytest.mark.parametrize("size", [10, 300_000])
def test_a_broken_element_does_not_affect_other_elements(
    tmp_path: Path, indent: int | None, old: str, new: str, kind: str, size: int
) -> None:
    data = json.dumps(rows(8, size), indent=indent).replace(old, new).encode("latin-1")
    items = read_all(write(tmp_path, "x.json", data))
    assert rows_of(items) == [row for row in rows(8, size) if row["id"] != 3]
    ((found, where),) = faults_of(items)
    line = 1 if indent is None else 2 + 3 * 13
    assert found == kind
    assert where == f"x.json, element 4 (line {line})"


@pytest.mark.parametrize("broken", [0, 4])
def test_the_first_or_last_element_may_be_broken(tmp_path: Path, broken: int) -> None:
    data = json.dumps(rows()).replace(f'"id": {broken}', f'"id": {broken}x').encode()
    items = read_all(write(tmp_path, "x.json", data))
    good = [row for row in rows_of(items) if "id" in row]
    assert [row["id"] for row in good] == [n for n in range(5) if n != broken]
    assert faults_of(items)[0] == ("json", f"x.json, element {broken + 1} (line 1)")


def test_invalid_utf8_affects_only_one_element(tmp_path: Path) -> None:
    data = json.dumps([{"text": f"row {n} 中"} for n in range(2000)], ensure_ascii=False).encode()
    items = read_all(write(tmp_path, "x.json", data.replace(b"row 700 \xe4", b"row 700 ")))
    assert len(rows_of(items)) == 1999
    assert faults_of(items) == [("utf8", "x.json, element 701 (line 1)")]


@pytest.mark.parametrize("cut", [1, 2, 7, 40, 60])
def test_a_truncated_array_gives_its_complete_elements_and_one_fault(tmp_path: Path, cut: int) -> None:
    data = json.dumps(rows(3)).encode()[:-cut]
    items = read_all(write(tmp_path, "x.json", data))
    assert rows_of(items) == rows(3 if cut == 1 else 2)
    assert [kind for kind, _ in faults_of(items)] == ["truncated"]


@pytest.mark.parametrize(
    ("data", "faults", "count"),
    [
        (b"[]", [], 0),
        (b" [ ] \n", [], 0),
        (b"\xef\xbb\xbf[{}]", [("bom", "x.json (line 1)")], 1),
        (b'[{"a": 1}] x', [("json", "x.json, element 1 (line 1)")], 1),
        (b'[{"a": 1},]', [("json", "x.json, element 1 (line 1)")], 1),
        (b'[{"a": 1}\n{"a": 2}]', [("json", "x.json, element 1 (line 2)")], 2),
        (
            b'[1, {"a": 1}, "x", [{}], null]',
            [("not_an_object", f"x.json, element {n} (line 1)") for n in (1, 3, 4, 5)],
            1,
        ),
        (b"", [("empty_file", "x.json (line 1)")], 0),
        (b"hello", [("json", "x.json (line 1)")], 0),
        (b"[" + b"[" * 100_000, [("json", "x.json, element 1 (line 1)")], 0),
    ],
)
def test_unusual_and_invalid_arrays_give_the_expected_rows_and_faults(
    tmp_path: Path, data: bytes, faults: list[tuple[str, str]], count: int
) -> None:
    items = read_all(write(tmp_path, "x.json", data), "json_array")
    assert faults_of(items)[: len(faults) or None] == faults
    assert len(rows_of(items)) == count


def test_the_fault_for_a_file_without_an_array_says_how_to_fix_it(tmp_path: Path) -> None:
    def detail(data: bytes) -> str:
        items = read_all(write(tmp_path, "x.json", data), "json_array")
        assert [kind for kind, _ in faults_of(items)] == ["not_an_object"]
        return details_of(items)

    assert "jsonl" in detail(b'{"a": 1}\n{"a": 2}\n')
    assert "'data'" in detail(b'{\n "version": 1,\n "data": [{"a": 1},\n {"a": 2}]\n}')


def test_elements_that_are_too_long_are_skipped(tmp_path: Path) -> None:
    data = json.dumps([{"id": 1}, {"id": 2, "text": "x" * 5_000_000}, {"id": 3}, {"id": 4, "t": "y" * 2000}]).encode()
    items = read_all(write(tmp_path, "x.json", data), limits=ReadLimits(max_record_bytes=1000))
    assert rows_of(items) == [{"id": 1}, {"id": 3}]
    assert faults_of(items) == [("too_long", f"x.json, element {n} (line 1)") for n in (2, 4)]


def test_elements_longer_than_the_buffer_are_read(tmp_path: Path) -> None:
    wanted = [{"id": n, "text": "x{" * 2_000_000} for n in range(3)]
    assert rows_of(read_all(write(tmp_path, "x.json", json.dumps(wanted).encode()))) == wanted


def test_the_position_of_a_valid_row_has_no_line_number(tmp_path: Path) -> None:
    items = read_all(write(tmp_path, "x.json", json.dumps(rows()).encode()))
    assert items[1][0].endswith("x.json, element 2")
    assert not any(isinstance(item, Fault) for _, item in items)
