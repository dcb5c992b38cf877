"""Tests of the token counts of raw documents: stored once per text and tokenizer, and never those of another text."""

from pathlib import Path

import pytest

from tests.data.corpus_maker import SpanTokenizer, write_corpus
from z2all_ds.base.errors import DataError
from z2all_ds.data.data_plan import open_documents

LENGTHS = [3, 0, 12, 7]


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
