import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.making import write_corpus
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.corpus import split as split_module
from z2all_ds.corpus.audit import audit_corpus
from z2all_ds.corpus.manifest import load_manifest
from z2all_ds.corpus.schema import parse_record
from z2all_ds.corpus.split import is_validation, split_corpus

CONTENTS = {"zh": [f"第 {n} 篇" for n in range(300)], "en": [f"document {n}" for n in range(200)]}


def lines(folder: Path, domain: str | None = None) -> list[bytes]:
    shards = [shard for shard in load_manifest(folder).shards if domain in (None, shard.domain)]
    return [line for shard in shards for line in (folder / shard.path).read_bytes().splitlines(keepends=True)]


def contents(folder: Path) -> list[str]:
    return [parse_record(line, "x").content for line in lines(folder)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", CONTENTS, documents_per_shard=40)


def test_both_sides_are_intact_corpora_with_the_same_lines_in_the_same_order(corpus: Path, tmp_path: Path) -> None:
    report = split_corpus(corpus, tmp_path / "out", 0.1)
    expected = {
        "train": [line for line in lines(corpus) if not is_validation(parse_record(line, "x").content, 0.1)],
        "validation": [line for line in lines(corpus) if is_validation(parse_record(line, "x").content, 0.1)],
    }
    for side, counts in (("train", report.train), ("validation", report.validation)):
        folder = tmp_path / "out" / side
        assert lines(folder) == expected[side]
        assert audit_corpus(folder).problems == ()
        assert load_manifest(folder).domains == counts
        assert load_manifest(folder).next_gid == load_manifest(corpus).next_gid
    assert sorted(lines(corpus)) == sorted(expected["train"] + expected["validation"])
    assert report.warnings == ()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["SPLIT.json", "train", "validation"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus", "out"]


@pytest.mark.processes
def test_worker_processes_give_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    assert split_corpus(corpus, tmp_path / "a", 0.1) == split_corpus(corpus, tmp_path / "b", 0.1, workers=2)
    files = [p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file()]
    assert len(files) > 10
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.text(st.characters(codec="utf-8"), max_size=8), max_size=40),
    st.lists(st.text(st.characters(codec="utf-8"), max_size=8), max_size=40),
    st.floats(0.05, 0.95),
    st.text(max_size=5),
    st.integers(1, 9),
)
def test_documents_keep_their_side_when_the_corpus_changes(
    old: list[str], new: list[str], share: float, seed: str, documents_per_shard: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "small", {"a": old})
        write_corpus(folder / "grown", {"b": new, "a": old + old}, documents_per_shard, first_gid=1000)
        for corpus in ("small", "grown"):
            split_corpus(folder / corpus, folder / f"{corpus}_split", share, seed)
        sides = {
            corpus: [set(contents(folder / f"{corpus}_split" / side)) for side in ("train", "validation")]
            for corpus in ("small", "grown")
        }
        for corpus, (train, validation) in sides.items():
            # Documents with equal content are on the same side, and no document is lost.
            assert not train & validation
            assert train | validation == set(contents(folder / corpus))
        for small, grown in zip(sides["small"], sides["grown"], strict=True):
            assert small <= grown


@pytest.mark.parametrize("share", [0.001, 0.05, 0.5, 0.99])
@pytest.mark.parametrize("seed", ["", "another"])
def test_the_validation_share_is_met_within_five_sigma(share: float, seed: str) -> None:
    count = 20_000
    found = sum(is_validation(f"text number {n}", share, seed) for n in range(count))
    five_sigma = 5 * (count * share * (1 - share)) ** 0.5
    assert abs(found - count * share) <= five_sigma


def test_a_larger_share_only_adds_documents_and_another_seed_chooses_others() -> None:
    texts = [f"text {n}" for n in range(5000)]
    small, large, other = (
        {text for text in texts if is_validation(text, share, seed)}
        for share, seed in ((0.1, ""), (0.2, ""), (0.1, "x"))
    )
    assert small < large
    assert len(small & other) < len(small) / 2


def test_the_sides_of_known_documents_never_change() -> None:
    """A split must be the same in every version of this package."""
    texts = ["", "a", "雪", "The quick brown fox", "document 7", "document 8", "\n", "\0"]
    assert [is_validation(text, 0.5) for text in texts] == [False, True, True, True, False, True, False, False]
    assert [is_validation(text, 0.5, "种子") for text in texts] == [True, True, True, False, False, True, True, True]


def test_a_domain_that_is_missing_on_one_side_gives_a_warning(tmp_path: Path) -> None:
    texts = [f"t{n}" for n in range(200)]
    write_corpus(tmp_path / "c", {
        "never": [text for text in texts if not is_validation(text, 0.3)],
        "always": [text for text in texts if is_validation(text, 0.3)],
    })  # fmt: skip
    report = split_corpus(tmp_path / "c", tmp_path / "out", 0.3)
    assert report.warnings == (
        "domain never: no documents in validation; the domain is too small for this share",
        "domain always: no documents in train; the domain is too small for this share",
    )
    assert split_corpus(tmp_path / "c", tmp_path / "out", 0.3) == report


def test_a_finished_split_is_reused_and_other_settings_are_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = split_corpus(corpus, tmp_path / "out", 0.1, "s")
    monkeypatch.setattr(split_module, "_split_shard", lambda *_: pytest.fail("split again"))
    assert split_corpus(corpus, tmp_path / "out", 0.1, "s") == first
    for share, seed in ((0.2, "s"), (0.1, "")):
        with pytest.raises(ConfigError, match="contains another split"):
            split_corpus(corpus, tmp_path / "out", share, seed)
    (tmp_path / "out" / "train" / "zh-00000.jsonl").write_text("")
    with pytest.raises(DataError, match=r"zh-00000\.jsonl: is missing or has the wrong size. Remove"):
        split_corpus(corpus, tmp_path / "out", 0.1, "s")


def test_output_folders_that_are_not_empty_or_inside_the_corpus_are_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("out", "file"):
        with pytest.raises(ConfigError, match="exists and is not empty"):
            split_corpus(corpus, tmp_path / name, 0.1)
    with pytest.raises(ConfigError, match="is inside the corpus"):
        split_corpus(corpus, corpus / "split", 0.1)
    (tmp_path / "empty").mkdir()
    split_corpus(corpus, tmp_path / "empty", 0.1)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_invalid_shares_are_refused(corpus: Path, tmp_path: Path, share: float) -> None:
    with pytest.raises(ConfigError, match="must be between 0 and 1"):
        split_corpus(corpus, tmp_path / "out", share)


def test_a_failed_split_leaves_no_files(corpus: Path, tmp_path: Path) -> None:
    before = shutil.copytree(corpus, tmp_path / "before")
    path = corpus / "en-00003.jsonl"
    path.write_bytes(path.read_bytes().replace(b"document 150", b"document 999"))
    with pytest.raises(DataError, match=r"en-00003\.jsonl: its SHA-256 differs from the manifest"):
        split_corpus(corpus, tmp_path / "out", 0.1)
    path.unlink()
    with pytest.raises(DataError, match=r"en-00003\.jsonl: no such file, but the manifest lists it"):
        split_corpus(corpus, tmp_path / "out", 0.1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["before", "corpus"]
    split_corpus(before, tmp_path / "out", 0.1)


def test_a_split_into_a_relative_path(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    split_corpus(corpus, "out", 0.1)
    assert audit_corpus(tmp_path / "out" / "train").ok
    assert os.getcwd() == str(tmp_path)


def test_a_fifo_instead_of_the_marker_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / "SPLIT.json")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        split_corpus(corpus, tmp_path / "out", 0.1)
