"""Tests of near duplicates: same candidates as datasketch's index, planted copies found, different texts kept."""

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.base.errors import MachineError
from z2all_ds.corpus.cleaning import duplicates, near_duplicates
from z2all_ds.corpus.cleaning.duplicates import Duplicates
from z2all_ds.corpus.cleaning.near_duplicates import (
    NUM_PERM,
    SEED,
    bands_and_rows,
    find_near_duplicates,
    signature,
)
from z2all_ds.corpus.cleaning.shingles import MAX_SHINGLES, shingle_hashes

datasketch = pytest.importorskip("datasketch", reason="near duplicates need datasketch")

WORDS = [f"word{number}" for number in range(3000)]
HAN = [chr(code) for code in range(0x4E00, 0x4E00 + 2500)]


def document(rng: random.Random, tokens: Sequence[str], length: int = 300, joint: str = " ") -> str:
    return joint.join(rng.choice(tokens) for _ in range(length))


def edited(rng: random.Random, text: str, changes: int, tokens: Sequence[str], joint: str = " ") -> str:
    """Replace `changes` evenly spaced tokens; each replacement changes five shingles."""
    parts = text.split(joint) if joint else list(text)
    for number in range(changes):
        parts[(2 * number + 1) * len(parts) // (2 * changes)] = rng.choice(tokens) + ("" if not joint else "x")
    return joint.join(parts)


def sign(texts: Sequence[str]) -> np.ndarray:
    return np.stack([signature(text) for text in texts])


def find(
    signatures: list[np.ndarray],
    threshold: float = 0.8,
    alive: list[np.ndarray] | None = None,
    scratch: Any = None,
) -> Duplicates:
    """Run the search, by default with all documents alive and the system's folder for temporary files."""
    alive = alive or [np.ones(len(part), dtype=bool) for part in signatures]
    return find_near_duplicates(signatures, threshold, alive, scratch)


def keep_of(texts: Sequence[str], threshold: float = 0.8) -> Any:
    return find([sign(texts)], threshold).keep[0].tolist()


def count(found: Duplicates) -> int:
    """Return the number of dropped documents."""
    return sum(int((~mask).sum()) for mask in found.keep)


def jaccard(one: str, other: str) -> float:
    first, second = set(shingle_hashes(one).tolist()), set(shingle_hashes(other).tolist())
    return len(first & second) / len(first | second)


def test_signatures_equal_those_of_datasketch() -> None:
    text = document(random.Random(0), WORDS, 1500)
    minhash = datasketch.MinHash(num_perm=NUM_PERM, seed=SEED, hashfunc=int)
    for value in shingle_hashes(text):
        minhash.update(value)
    assert (signature(text) == minhash.hashvalues).all() and signature(text).dtype == np.uint32


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.9])
def test_the_candidates_equal_those_of_the_datasketch_index(tmp_path: Path, threshold: float) -> None:
    rng = random.Random(1)
    texts = [document(rng, WORDS, 120) for _ in range(150)]
    texts += [edited(rng, rng.choice(texts), rng.randint(0, 8), WORDS) for _ in range(150)]
    signatures = sign(texts)
    index = datasketch.MinHashLSH(num_perm=NUM_PERM, params=bands_and_rows(threshold))
    theirs = set()
    scheme = datasketch.MinHash(num_perm=4).__dict__.get("scheme")
    for number, values in enumerate(signatures):
        options = {"scheme": scheme} if scheme else {}
        minhash = datasketch.MinHash(num_perm=NUM_PERM, seed=SEED, hashvalues=values, **options)
        theirs |= {(number, earlier) for earlier in index.query(minhash)}
        index.insert(number, minhash)
    ours = set()
    parts, alive = [signatures[:100], signatures[100:]], np.ones(len(signatures), dtype=bool)
    for numbers, places in near_duplicates._runs(parts, bands_and_rows(threshold), alive, tmp_path):
        for at, place in enumerate(places):
            ours |= {(int(numbers[at]), int(earlier)) for earlier in numbers[at - place : at]}
    assert ours == theirs and len(ours) >= 30


@pytest.mark.parametrize(("tokens", "joint"), [(WORDS, " "), (HAN, "")])
@pytest.mark.parametrize(("changes", "found"), [(0, True), (2, True), (4, True), (20, False), (60, False)])
def test_copies_with_few_changes_are_dropped_and_others_kept(
    tokens: Sequence[str], joint: str, changes: int, found: bool
) -> None:
    rng = random.Random(2)
    originals = [document(rng, tokens, joint=joint) for _ in range(40)]
    copies = [edited(rng, text, changes, tokens, joint) for text in originals]
    similarity = np.mean([jaccard(*pair) for pair in zip(originals, copies, strict=True)])
    assert (similarity > 0.87) if found else (similarity < 0.6)
    keep = keep_of([*originals, *copies])
    assert keep[:40] == [True] * 40
    # 14 bands of 9 rows miss about 1 % of the copies with similarity 0.87, and the estimated similarity of others may
    # be too low. Exact copies are always found.
    dropped = keep[40:].count(False)
    assert dropped == (40 if changes == 0 else dropped) and (dropped >= 37 if found else dropped == 0)


def test_each_dropped_document_is_paired_with_the_earlier_similar_one() -> None:
    rng = random.Random(3)
    texts = [document(rng, HAN, joint="") for _ in range(20)]
    texts += [edited(rng, texts[number], 1, HAN, "") for number in (3, 7, 11)]
    found = find([sign(texts[:9]), sign(texts[9:])])
    assert found.pairs == [(20, 3), (21, 7), (22, 11)] and count(found) == 3
    assert [len(mask) for mask in found.keep] == [9, 14]


def test_similarity_to_an_earlier_document_counts_even_if_that_one_is_dropped() -> None:
    base = np.arange(NUM_PERM, dtype=np.uint32) + 1
    second, third = base.copy(), base.copy()
    second[-20:] += 1000  # 108 of 128 values in common with the first
    third[-40:-20] += 5000  # 88 values in common with the first
    third[-20:] += 1000  # 108 values in common with the second
    assert find([np.stack([base, third])]).keep[0].tolist() == [True, True]
    assert find([np.stack([base, second, third])]).keep[0].tolist() == [True, False, False]
    # Two different documents are kept although a later one is similar to both.
    assert find([np.stack([base, third, second])]).keep[0].tolist() == [True, True, False]


def test_candidates_below_the_threshold_are_kept() -> None:
    """Candidates can share a band by chance; the complete signatures decide."""
    base = np.arange(NUM_PERM, dtype=np.uint32)
    for common, kept in ((102, True), (103, False)):  # 0.8 * 128 = 102.4
        other = base.copy()
        other[common:] += 1000
        assert find([np.stack([base, other])]).keep[0].tolist() == [True, kept]


def test_short_documents_are_compared_and_empty_ones_always_kept() -> None:
    texts = ["", "   ", "短", "长", "短", "!!", "??", "!!", "two words", "two words", "a b c d", "a b c e", ""]
    keep = keep_of(texts)
    assert [text for text, kept in zip(texts, keep, strict=True) if not kept] == ["短", "!!", "two words"]


def test_documents_that_were_dropped_before_the_search_are_not_compared() -> None:
    signatures = sign(["one two three four five six"] * 3)
    found = find([signatures], alive=[np.array([False, True, True])])
    assert found.keep[0].tolist() == [False, True, False] and found.pairs == [(2, 1)]


def test_copies_are_found_in_a_long_run_of_documents_with_the_same_band() -> None:
    """A document is compared with the first ones of its run and with those just before it."""
    rng = np.random.default_rng(0)
    signatures = rng.integers(0, 1 << 31, (200, NUM_PERM), dtype=np.uint32)
    signatures[:, :13] = 7
    signatures[150] = signatures[10]  # a copy of one of the first documents of the run
    signatures[190] = signatures[170]  # a copy of one of the 32 documents before it
    found = find([signatures])
    assert found.pairs == [(150, 10), (190, 170)] and count(found) == 2


@pytest.mark.parametrize("limit", [None, 0])
def test_parts_buckets_and_temporary_files_do_not_change_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    rng = random.Random(4)
    texts = [document(rng, WORDS, 60) for _ in range(60)]
    texts += [edited(rng, rng.choice(texts), rng.randint(0, 3), WORDS) for _ in range(60)]
    whole = find([sign(texts)])
    np.save(tmp_path / "part.npy", sign(texts[:50]))
    parts = [np.load(tmp_path / "part.npy", mmap_mode="r"), sign(texts[50:51]), sign(texts[51:])]
    if limit is not None:
        monkeypatch.setattr(near_duplicates, "_BYTES_IN_MEMORY", limit)
    monkeypatch.setattr(duplicates, "ROWS_PER_BUCKET", 7)
    found = find(parts, scratch=tmp_path)
    assert np.concatenate(found.keep).tolist() == whole.keep[0].tolist() and found.pairs == whole.pairs
    assert 10 < count(found) == count(whole) < 60
    assert [path.name for path in tmp_path.iterdir()] == ["part.npy"]


def test_a_threshold_of_one_drops_only_documents_with_the_same_shingles() -> None:
    texts = ["one two three four five six", "One, two, three, four, five, six!", "one two three four five seven"]
    assert bands_and_rows(1.0) == (2, 64)
    assert keep_of(texts, 1.0) == [True, False, True]


def test_an_empty_corpus_has_no_duplicates() -> None:
    assert find([]).keep == []
    assert count(find([np.zeros((0, NUM_PERM), np.uint32)])) == 0


def test_shingles_ignore_case_whitespace_and_punctuation() -> None:
    assert set(shingle_hashes("The quick, brown fox -- jumps!")) == set(shingle_hashes("the Quick brown\nfox jumps"))
    assert set(shingle_hashes("今天，天气真好。")) == set(shingle_hashes("今天 天气真好"))
    assert set(shingle_hashes("ab c d e f")) != set(shingle_hashes("a bc d e f"))
    assert len(shingle_hashes("今天天气真好")) == 2 and len(shingle_hashes("我 love 深度 learning")) == 1


def test_shingles_do_not_depend_on_their_position() -> None:
    inside = document(random.Random(5), WORDS, 50)
    assert set(shingle_hashes(inside)) <= set(shingle_hashes("é 中 " * 30_000 + inside + " end"))


def test_a_copy_of_a_long_document_is_found_although_shingles_are_sampled() -> None:
    rng = random.Random(6)
    text = document(rng, WORDS, MAX_SHINGLES * 3)
    copy = edited(rng, text, 600, WORDS)  # 600 of 49,152 words
    assert len(shingle_hashes(text)) == MAX_SHINGLES
    assert keep_of([text, copy]) == [True, False]
    assert jaccard(text, copy) > 0.85


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=80))
def test_signatures_are_deterministic_and_empty_only_for_blank_texts(text: str) -> None:
    values = signature(text)
    assert values.shape == (NUM_PERM,) and (values == signature(text)).all()
    assert (values == near_duplicates.EMPTY).all() == (not text.split())


def test_a_missing_datasketch_package_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    near_duplicates._minhash.cache_clear()
    with pytest.raises(MachineError, match=r"pip install 'z2all_ds\[corpus\]'"):
        signature("some text")
