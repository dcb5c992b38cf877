"""Tests of JSON Lines, text lines and plain text: slices give every line once, and every broken line is reported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.forms.reading import details_of, faults_of, read_all, rows_of, write
from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms import ReadLimits, plan_slices
from z2all_ds.corpus.forms.streams import Stream
from z2all_ds.corpus.forms.text_files import LongLine, line_blocks

LINES = st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"\r")), max_size=12)


@given(lines=LINES, ended=st.booleans(), slice_bytes=st.integers(1, 40), longest=st.integers(1, 12))
def test_slices_of_any_size_give_every_line_once(
    lines: list[bytes], ended: bool, slice_bytes: int, longest: int
) -> None:
    data = b"\n".join(lines) + (b"\n" if ended and lines else b"")
    wanted = [line if len(line) <= longest else len(line) for line in data.split(b"\n")]
    if wanted[-1] == b"":
        wanted.pop()
    found: list[bytes | int] = []
    for start in range(0, max(1, len(data)), slice_bytes):
        stream = Stream(data[at : at + 3] for at in range(max(0, start - 1), len(data), 3))
        size = slice_bytes + (start > 0)
        for block in line_blocks(stream, longest, skip_first=start > 0, size=size):
            found += [block] if isinstance(block, LongLine) else block.removesuffix(b"\n").split(b"\n")
    assert found == wanted


@settings(max_examples=60)
@given(
    texts=st.lists(st.text(alphabet='ab"\\{}\u4e2d\U0001f600\u2028\x85', max_size=8), max_size=15),
    ends=st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
    slice_bytes=st.integers(1, 300),
)
def test_slices_of_a_file_give_the_same_rows_and_line_numbers(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], ends: bytes, slice_bytes: int
) -> None:
    rows = [{"n": number, "text": text} for number, text in enumerate(texts)]
    data = ends.join(json.dumps(row, ensure_ascii=False).encode() for row in rows)
    path = write(tmp_path_factory.mktemp("s"), "a.jsonl", data)
    pieces = plan_slices(path, "jsonl", slice_bytes)
    assert sum(piece.raw_bytes for piece in pieces) == len(data)
    items = [(where, item) for where, item in read_all(path, "jsonl", slice_bytes=slice_bytes)]
    assert rows_of(items) == rows
    step = 2 if ends == b"\n\n" else 1
    places = [where.rpartition(":")[2] for where, item in items if not isinstance(item, Fault)]
    assert places == [str(1 + step * number) for number in range(len(rows))]


GOOD = b'{"a": 1}\n'


@pytest.mark.parametrize(
    ("data", "faults", "rows"),
    [
        (GOOD + b'{"a": \n' + GOOD, [("json", "x.jsonl:2")], 2),
        (GOOD + b'{"a": 2', [("truncated", "x.jsonl:2")], 1),
        (GOOD + b'{"a": "\xe4\xb8', [("truncated", "x.jsonl:2")], 1),
        (GOOD + b'{"a": 2}', [], 2),
        (GOOD + b'{"a": "\xff"}\n' + GOOD, [("utf8", "x.jsonl:2")], 2),
        (GOOD + b'{"a": "\0"}\n', [("nul", "x.jsonl:2")], 1),
        (GOOD + b'{"a": ["\\u0000"]}\n', [("nul", "x.jsonl:2")], 1),
        (b'{"a": "\\\\u0000"}\n', [], 1),
        (b"[1]\n" + GOOD + b"3\n", [("not_an_object", "x.jsonl:1"), ("not_an_object", "x.jsonl:3")], 1),
        (b'{"a": NaN}\n{"a": -Infinity}\n{"a": 1e999}\n', [("json", f"x.jsonl:{n}") for n in (1, 2, 3)], 0),
        (b"\xef\xbb\xbf" + GOOD + b"\xef\xbb\xbf" + GOOD, [("bom", "x.jsonl:1"), ("bom", "x.jsonl:2")], 2),
        (GOOD + b'{"a": 2}\r\n{"a": 3}\r\n', [("line_ends", "x.jsonl:2")], 3),
        (b'{"a": 1}\r{"a": 2}\n' + GOOD, [("json", "x.jsonl:1")], 1),
        (b"\n  \n" + GOOD + b"\n", [], 1),
        (b"", [("empty_file", "x.jsonl:1")], 0),
        (b"[" * 100_000 + b"\n" + GOOD, [("json", "x.jsonl:1")], 1),
        (b'{"a": ' + b"9" * 5000 + b"}\n", [("json", "x.jsonl:1")], 0),
    ],
)
def test_every_broken_line_is_reported_with_its_line_number(
    tmp_path: Path, data: bytes, faults: list[tuple[str, str]], rows: int
) -> None:
    items = read_all(write(tmp_path, "x.jsonl", data))
    assert faults_of(items) == faults
    assert len(rows_of(items)) == rows


def test_lone_surrogates_and_integers_that_orjson_refuses_or_changes_are_read(tmp_path: Path) -> None:
    big = 2**64
    data = (
        b'{"a": "x\\ud800y", "b": [{"\\udc00": "\\ud83d\\ude00"}]}\n'
        + f'{{"a": {big}, "b": 1e30}}\n{{"a": [{{"b": {-big}}}]}}\n'.encode()
    )
    assert rows_of(read_all(write(tmp_path, "x.jsonl", data))) == [
        {"a": "x\ufffdy", "b": [{"\ufffd": "\U0001f600"}]},
        {"a": big, "b": 1e30},
        {"a": [{"b": -big}]},
    ]


def test_gb18030_text_is_recognised_and_the_fault_names_iconv(tmp_path: Path) -> None:
    items = read_all(write(tmp_path, "x.jsonl", '{"a": "中文"}\n'.encode("gb18030")))
    assert "iconv -f GB18030 -t UTF-8" in details_of(items)


def test_text_lines_become_rows_and_invalid_lines_become_faults(tmp_path: Path) -> None:
    path = write(tmp_path, "wiki_00", b"\xef\xbb\xbfone\r\n\n two\n\xff\nth\0ree\nlast")
    items = read_all(path, "lines", slice_bytes=5)
    assert rows_of(items) == [{"text": "one"}, {"text": " two"}, {"text": "last"}]
    assert [kind for kind, _ in faults_of(items)] == ["line_ends", "bom", "utf8", "nul"]
    assert faults_of(items)[2:] == [("utf8", "wiki_00:4"), ("nul", "wiki_00:5")]


def test_lines_that_are_too_long_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", GOOD + b'{"a": "' + b"x" * 5000 + b'"}\n' + GOOD)
    items = read_all(path, limits=ReadLimits(max_record_bytes=100), slice_bytes=1000)
    assert len(rows_of(items)) == 2
    assert faults_of(items) == [("too_long", "x.jsonl:2")]


def test_skipping_a_line_of_100_mb_uses_little_memory(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", GOOD)
    with path.open("ab") as file:
        file.write(b'{"a": "')
        for _ in range(100):
            file.write(b"x" * 2**20)
        file.write(b'"}\n' + GOOD)
    code = f"""if True:
        import resource, sys
        from pathlib import Path
        from tests.corpus.forms.reading import read_all, rows_of
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        items = read_all(Path({str(path)!r}))
        assert len(rows_of(items)) == 2 and len(items) == 3, items
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    grown_kib = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    assert grown_kib < 150 * 1024  # the default limit per record is 64 MiB


@pytest.mark.parametrize(
    ("data", "kinds", "text"),
    [
        (b"one\ntwo", [], "one\ntwo"),
        (b"\xef\xbb\xbfone\r\ntwo\r\n", ["bom", "line_ends"], "one\ntwo\n"),
        (b"", ["empty_file"], None),
        (b"a\0b", ["nul"], None),
        ("中文".encode("gb18030"), ["utf8"], None),
        (b"x" * 1001, ["too_long"], None),
    ],
)
def test_a_plain_text_file_becomes_one_row_or_a_fault(
    tmp_path: Path, data: bytes, kinds: list[str], text: str | None
) -> None:
    items = read_all(write(tmp_path, "a.b.txt", data), limits=ReadLimits(max_record_bytes=1000))
    assert faults_of(items) == [(kind, "a.b.txt") for kind in kinds]
    assert rows_of(items) == ([] if text is None else [{"text": text, "name": "a.b"}])
    if kinds == ["utf8"]:
        assert "iconv -f GB18030" in details_of(items)
