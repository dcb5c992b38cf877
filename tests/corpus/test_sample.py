import json
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.making import write_corpus, write_shard
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.corpus import sample as sample_module
from z2all_ds.corpus.manifest import FORMAT_VERSION, Manifest, load_manifest, write_manifest
from z2all_ds.corpus.sample import describe, find_document, sample_documents
from z2all_ds.corpus.schema import Record


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    texts = {"en": [f"text {n} " * (n % 9 + 1) for n in range(300)], "zh": [f"第 {n} 篇" for n in range(200)]}
    return write_corpus(tmp_path / "corpus", texts, documents_per_shard=70)


def test_the_same_seed_gives_the_same_distinct_documents(corpus: Path) -> None:
    found = sample_documents(corpus, 20, seed=5)
    assert found == sample_documents(corpus, 20, seed=5)
    assert found != sample_documents(corpus, 20, seed=6)
    assert len({record.gid for _, record in found}) == 20
    assert {record.data_src for _, record in found} == {"en", "zh"}
    for path, record in found:
        assert record.to_line().encode() in (corpus / path).read_bytes()


def test_samples_can_be_limited_to_one_domain(corpus: Path) -> None:
    assert {path[:2] for path, _ in sample_documents(corpus, 30, "zh")} == {"zh"}
    with pytest.raises(ConfigError, match=r"domain 'fr': the domains of .* are en, zh"):
        sample_documents(corpus, 1, "fr")


def test_every_document_is_equally_likely(tmp_path: Path) -> None:
    """The length of a document does not change its probability."""
    write_corpus(tmp_path, {"a": ["x", "y" * 100_000, "z", "w"]}, documents_per_shard=3)
    counts = Counter(record.content[0] for seed in range(400) for _, record in sample_documents(tmp_path, 1, seed=seed))
    assert all(70 < counts[letter] < 130 for letter in "xyzw")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=30), max_size=15), st.integers(1, 20), st.integers(0, 3))
def test_the_requested_number_of_documents_or_all_are_returned(texts: list[str], count: int, seed: int) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder), {"a": texts}, documents_per_shard=4)
        gids = [record.gid for _, record in sample_documents(folder, count, seed=seed)]
        assert len(gids) == len(set(gids)) == min(count, len(texts))


def test_invalid_counts_and_damaged_shards_are_reported(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="count 0: must be at least 1"):
        sample_documents(corpus, 0)
    with open(corpus / "zh-00001.jsonl", "ab") as stream:
        stream.write(b"{}\n")
    with pytest.raises(DataError, match=r"zh-00001\.jsonl: has 71 records, the manifest says 70"):
        find_document(corpus, 400)
    (corpus / "zh-00000.jsonl").unlink()
    with pytest.raises(DataError, match=r"zh-00000\.jsonl: the file cannot be read \(No such file or directory\)"):
        sample_documents(corpus, 190, "zh")


def test_every_gid_is_found_by_binary_search(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_module, "progress", lambda *_: pytest.fail("read everything"))
    for gid in range(0, 500, 3):
        path, record = find_document(corpus, gid)
        assert record.gid == gid
        assert record.to_line().encode() in (corpus / path).read_bytes()


def test_unsorted_gids_are_found_by_a_full_scan(tmp_path: Path) -> None:
    gids = [(n * 37) % 101 for n in range(101)]
    shard = write_shard(tmp_path, "a.jsonl", "a", [Record(gid, 0, "a", "", "", f"{gid}", "", {}) for gid in gids])
    write_manifest(tmp_path, Manifest(FORMAT_VERSION, (shard,)))
    assert [find_document(tmp_path, gid)[1].content for gid in range(101)] == [str(gid) for gid in range(101)]


def test_a_missing_gid_is_reported(corpus: Path) -> None:
    for gid in (500, -1, 10**30):
        with pytest.raises(DataError, match=f"gid {gid}: none of the 500 documents of .* has it"):
            find_document(corpus, gid)
    write_manifest(corpus, replace(load_manifest(corpus), shards=()))
    with pytest.raises(DataError, match="none of the 0 documents"):
        find_document(corpus, 1)


def test_long_contents_are_truncated_in_descriptions() -> None:
    full = Record(7, 3, "zh", "散文", "雪", "下雪了。\n很大。", "一句话", {"n": [1]})
    bare = Record(8, 4, "en", "", "", "x" * 1500, "", {})
    shown = describe([("zh-0.jsonl", full), ("en-0.jsonl", bare)], max_chars=10)
    assert "\n".join(shown).split("\n") == [
        "--- zh-0.jsonl  gid 7  id 3  zh  [散文]",
        "title: 雪",
        "desc: 一句话",
        f"others: {json.dumps({'n': [1]})}",
        "content (8 characters):",
        "下雪了。",
        "很大。",
        "",
        "--- en-0.jsonl  gid 8  id 4  en",
        "content (1,500 characters):",
        "xxxxxxxxxx ... (1,490 more characters)",
        "",
    ]
    assert list(describe([])) == []
