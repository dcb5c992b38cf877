import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from z2all_ds.corpus import audit_corpus, load_manifest
from z2all_ds.corpus.audit import _NumberSet
from z2all_ds.corpus.manifest import write_manifest


@pytest.fixture
def corpus(small_corpus: Path, tmp_path: Path) -> Path:
    return shutil.copytree(small_corpus, tmp_path / "corpus")


def test_a_flipped_byte_is_found(corpus: Path) -> None:
    path = corpus / "en-00000.jsonl"
    data = bytearray(path.read_bytes())
    place = data.index(b" the ") + 1
    data[place] ^= 0x20  # "the" -> "The": still a good record, only the hash can tell
    path.write_bytes(bytes(data))
    assert audit_corpus(corpus).problems == (
        "en-00000.jsonl: its SHA-256 is not that of the manifest, the content was changed",
    )


def test_a_cut_shard_is_found(corpus: Path) -> None:
    path = corpus / "zh-00000.jsonl"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-20])
    report = audit_corpus(corpus)
    assert not report.ok
    assert any(problem.startswith("zh-00000.jsonl:") and "not JSON" in problem for problem in report.problems)
    assert "zh-00000.jsonl: the last line has no end, the file was cut" in report.problems
    assert f"zh-00000.jsonl: {size - 20} bytes, the manifest says {size}" in report.problems


def test_missing_and_unlisted_shards(corpus: Path) -> None:
    (corpus / "code-00001.jsonl").rename(corpus / "stray.jsonl")
    assert audit_corpus(corpus).problems == ("code-00001.jsonl: missing", "stray.jsonl: not in the manifest")


def test_a_gid_twice_and_a_wrong_count(corpus: Path) -> None:
    manifest = load_manifest(corpus)
    path = corpus / "zh-00000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    record = json.loads(lines[1])
    record["gid"] -= 1
    lines[1] = (json.dumps(record, ensure_ascii=False) + "\n").encode()
    path.write_bytes(b"".join(lines[:-1]))
    problems = audit_corpus(corpus).problems
    assert f"zh-00000.jsonl:2: gid {record['gid']} belongs to an earlier document too" in problems
    documents = next(shard.documents for shard in manifest.shards if shard.path == "zh-00000.jsonl")
    assert f"zh-00000.jsonl: {documents - 1} documents, the manifest says {documents}" in problems


def test_broken_lines_are_listed_up_to_ten(corpus: Path) -> None:
    path = corpus / "en-00000.jsonl"
    path.write_bytes(path.read_bytes() + b"{broken\n" * 25)
    problems = audit_corpus(corpus).problems
    assert sum("not JSON" in problem for problem in problems) == 10
    assert "en-00000.jsonl: 15 more broken lines" in problems


def test_an_empty_corpus_is_sound_but_empty(tmp_path: Path, small_corpus: Path) -> None:
    write_manifest(tmp_path, replace(load_manifest(small_corpus), shards=()))
    report = audit_corpus(tmp_path)
    assert (report.ok, report.documents, report.bytes) == (True, 0, 0)


def test_number_set() -> None:
    numbers, seen = [0, 1, 4095, 4096, 10**18, -1, 0, 4096, 10**18, -1], _NumberSet()
    assert [seen.add(number) for number in numbers] == [True] * 6 + [False] * 4
