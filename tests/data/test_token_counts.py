"""Tests of the token counts of raw documents: stored once per text and tokenizer, and never those of another text."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from tests.data.corpus_maker import SpanTokenizer, write_corpus
from z2all_ds.base.errors import DataError
from z2all_ds.base.storage.local import LocalFolder
from z2all_ds.data.data_plan import open_documents

LENGTHS = [3, 0, 12, 7]


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr("z2all_ds.data.token_counts.private_temp_dir", lambda: folder)
    return folder


class Counting(SpanTokenizer):
    """Counts its calls."""

    calls = 0

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        self.calls += 1
        return super().encode_batch(texts)


def counts(corpus: Path, tokenizer: SpanTokenizer, verify: bool = False) -> list[int]:
    domain = open_documents(corpus, tokenizer, verify=verify).domains["web"]
    found: list[int] = domain.token_counts().tolist()
    return found


def test_counts_are_stored_and_used_again(tmp_path: Path) -> None:
    corpus, expected = write_corpus(tmp_path, {"web": LENGTHS}, 3), [length + 1 for length in LENGTHS]
    assert counts(corpus, first := Counting()) == expected
    assert counts(corpus, again := Counting()) == expected
    assert (first.calls, again.calls) == (1, 0)
    assert counts(corpus, other := Counting("another tokenizer")) == expected
    assert other.calls == 1
    assert len(list(corpus.glob(".*.token-counts"))) == 2


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"\1" + data[1:], lambda data: b""])
def test_damaged_counts_are_counted_again(tmp_path: Path, damage: object) -> None:
    corpus = write_corpus(tmp_path, {"web": LENGTHS}, 3)
    whole = counts(corpus, SpanTokenizer())
    (stored,) = corpus.glob(".*.token-counts")
    before = stored.read_bytes()
    stored.write_bytes(damage(before))  # type: ignore[operator]
    assert counts(corpus, SpanTokenizer()) == whole
    assert stored.read_bytes() == before


def test_counts_of_a_changed_text_are_not_stored(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, {"web": LENGTHS})
    (shard,) = corpus.glob("web*")
    shard.write_bytes(shard.read_bytes().replace(b'"3 7"', b'"3 6"'))
    with pytest.raises(DataError, match=rf"{shard.name}: its SHA-256 differs from the manifest"):
        counts(corpus, SpanTokenizer(), verify=True)
    assert not list(corpus.glob(".*.token-counts"))
    assert counts(corpus, SpanTokenizer()) == [4, 1, 13, 7]


class Slow(SpanTokenizer):
    """Leaves a mark for each call, and takes its time."""

    def __init__(self, marks: Path) -> None:
        super().__init__()
        self.marks = marks

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        (self.marks / str(os.getpid())).touch()
        time.sleep(0.3)
        return super().encode_batch(texts)


@pytest.mark.processes
@pytest.mark.parametrize("is_writable", [True, False])
def test_one_of_several_processes_counts(
    tmp_path: Path, is_writable: bool, monkeypatch: pytest.MonkeyPatch, own_temporary_folder: Path
) -> None:
    """Also in a corpus folder that cannot be written."""
    monkeypatch.setattr("z2all_ds.data.token_counts.SILENT_SECONDS", 0.02)
    corpus, marks = write_corpus(tmp_path / "corpus", {"web": LENGTHS}, 3), tmp_path / "marks"
    marks.mkdir()
    if not is_writable:  # root may write everywhere
        write_whole = LocalFolder.write_whole

        def refused(folder: LocalFolder, name: str, data: bytes) -> None:
            if folder.location == str(corpus):
                raise PermissionError(13, "Permission denied")
            write_whole(folder, name, data)

        monkeypatch.setattr(LocalFolder, "write_whole", refused)
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def count() -> None:
        beats = list[int]()
        domain = open_documents(corpus, Slow(marks)).domains["web"]
        results.put((domain.token_counts(lambda: beats.append(1)).tolist(), len(beats)))

    processes = [context.Process(target=count) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert [counted for counted, _ in found] == [[length + 1 for length in LENGTHS]] * 3
    assert sum(beats > 0 for _, beats in found) >= 2  # of those who count or wait
    assert len(list(marks.iterdir())) == 1
    assert len(list(corpus.glob(".*.token-counts"))) == is_writable
    assert len(list((own_temporary_folder / "token-counts").glob(".*.token-counts"))) == 1 - is_writable
