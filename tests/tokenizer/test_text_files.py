import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.base.errors import DataError
from z2all_ds.tokenizer import text_files
from z2all_ds.tokenizer.text_files import file_pieces


def read(path: Path) -> list[tuple[int, str]]:
    return [(size, text()) for size, text in file_pieces(path)]


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\ufeff"), max_size=40)),
    st.integers(4, 40),
)
def test_the_blocks_of_a_file_join_to_its_text(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], block: int
) -> None:
    path = tmp_path_factory.mktemp("blocks") / "a.txt"
    path.write_bytes("\n".join(lines).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "BLOCK_BYTES", block)
        patch.setattr(text_files, "LONGEST_LINE_BYTES", 2 * block)
        pieces = read(path)
    assert "".join(text for _, text in pieces) == "\n".join(lines)
    assert [size for size, _ in pieces] == [len(text.encode()) for _, text in pieces]


def test_byte_order_mark_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert read(tmp_path / "a.txt") == [(6, "abc")]


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("好\n".encode() * 30000 + "文件".encode("gb18030"))
    with pytest.raises(DataError, match=r"a\.txt: not UTF-8 \(invalid .* at byte 120000\)"):
        read(tmp_path / "a.txt")
    (tmp_path / "b.txt").write_bytes(b"\x80" * 2_000_000)
    with pytest.raises(DataError, match="at byte 0"):
        read(tmp_path / "b.txt")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": ', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"title": "x"}', "under text or content"),
        (b'{"text": 3}', "under text or content"),
        (b"[]", "under text or content"),
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
    ],
)
def test_invalid_jsonl_lines_are_reported_with_their_line_number(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=r"a\.jsonl:2") as caught:
        read(tmp_path / "a.jsonl")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_fifo_is_refused(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=r"not readable \(not a regular file"):
        list(file_pieces(tmp_path / name))
