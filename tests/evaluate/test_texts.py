"""Tests for texts from plain files and corpora, by domain and by rank."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.evaluate.texts import open_texts

TEXTS = ["今天", "", "two\nlines", "four", "五"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "书.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    pq.write_table(pa.table({"id": [1, 2], "content": ["x", "y"]}), tmp_path / "p.parquet")
    (tmp_path / "notes").mkdir()
    for name in ("b", "a"):
        (tmp_path / "notes" / f"{name}.txt").write_text(f"{name}\n\n天", encoding="utf-8")
    return tmp_path


def test_each_file_or_subfolder_of_a_folder_is_a_domain(folder: Path) -> None:
    found = {domain.name: list(domain.read(0, 1)) for domain in open_texts(folder, None)}
    assert found == {"书": TEXTS, "p": ["x", "y"], "notes": ["a\n\n天", "b\n\n天"]}


def test_links_out_of_a_folder_are_followed_only_if_asked(folder: Path) -> None:
    (folder / "notes/c.txt").symlink_to(folder / "书.jsonl")
    with pytest.raises(DataError, match=r"c\.txt: leads out of .*notes, to .*--follow-links"):
        open_texts(folder / "notes", None)
    assert len(list(open_texts(folder / "notes", None, follow_links=True)[0].read(0, 1))) == 3
    assert len(open_texts(folder, None)) == 3  # inside


def test_the_first_documents_are_distributed_over_the_ranks(folder: Path) -> None:
    (domain,) = open_texts(folder / "书.jsonl", 4)
    assert [list(domain.read(rank, 2)) for rank in range(2)] == [["今天", "two\nlines"], ["", "four"]]
    (whole,) = open_texts(folder / "书.jsonl", 0)
    assert list(whole.read(0, 1)) == TEXTS


def test_documents_of_a_corpus_are_distributed_over_the_ranks(small_corpus: Path) -> None:
    for domain, default in zip(open_texts(small_corpus, 7), open_texts(small_corpus, None), strict=True):
        assert domain.num_documents == 7
        alone = list(domain.read(0, 1))
        shares = [list(domain.read(rank, 3)) for rank in range(3)]
        assert [shares[place % 3][place // 3] for place in range(7)] == alone
        assert list(default.read(0, 1))[:7] == alone and default.num_documents in range(8, 51)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.csv", b"a", r"file type '\.csv' unknown\. Known: \.jsonl, \.parquet, \.txt\."),
        ("x.jsonl", b'{"words": 1}\n', r"x\.jsonl:1: each line is an object"),
        ("x.txt", b"\xff", "not UTF-8"),
        ("x.parquet", b"junk", "not a readable Parquet file"),
    ],
)
def test_invalid_text_files_are_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        list(open_texts(tmp_path / name, None)[0].read(0, 1))
    assert "\n" not in str(caught.value)


def test_a_parquet_file_without_texts_is_refused(tmp_path: Path) -> None:
    not_utf8 = pa.array([b"\xff"]).view(pa.string())
    for column, words in (
        ({"a": ["x"]}, "no column text or content"),
        ({"text": [None, "x"]}, "row 1: text holds NoneType, not text"),
        ({"text": not_utf8}, "row 1: .*UTF-8"),
        ({"text": ["a" * 1_000_000] * 1_000}, "expands too much"),
    ):
        pq.write_table(pa.table(column), tmp_path / "x.parquet")
        with pytest.raises(DataError, match=words):
            list(open_texts(tmp_path / "x.parquet", None)[0].read(0, 1))


def test_an_empty_or_missing_folder_and_a_negative_limit_are_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match="no such file"):
            open_texts(place, None)
    with pytest.raises(ConfigError, match=r"^documents=-1: must be 0 \(all\) or above"):
        open_texts(tmp_path, -1)
