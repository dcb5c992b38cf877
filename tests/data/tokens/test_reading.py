"""Tests for reading token shards: the same documents as from raw text; damage is reported with its record."""

import hashlib
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_prefetch import wait_until
from tests.data.tokens.text_corpora import files_in, write_token_corpus
from z2all_ds.base.errors import DataError
from z2all_ds.corpus.manifest import load_manifest
from z2all_ds.corpus.reading.readers import open_domains
from z2all_ds.corpus.reading.verification import VERIFIER
from z2all_ds.data.documents import Domain, RawDomain
from z2all_ds.data.tokens import reading
from z2all_ds.data.tokens.reading import is_token_corpus, load_token_manifest, open_token_corpus
from z2all_ds.data.tokens.tokenizing import tokenize_corpus
from z2all_ds.tokenizer import load_tokenizer

Pair = tuple[dict[str, RawDomain], dict[str, Domain]]


@pytest.fixture(scope="module")
def tokens(small_corpus: Path, small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "t"
    tokenize_corpus(small_corpus, small_tokenizer, folder, workers=1)
    return folder


@pytest.fixture(scope="module")
def pair(small_corpus: Path, small_tokenizer: Path, tokens: Path) -> Pair:
    """Return the same domains read from text and from tokens."""
    tokenizer, manifest = load_tokenizer(small_tokenizer), load_manifest(small_corpus)
    raw = {name: RawDomain(reader, tokenizer) for name, reader in open_domains(small_corpus, manifest).items()}
    return raw, dict(open_token_corpus(tokens).domains)


def test_documents_are_the_same_as_from_text(pair: Pair, tokens: Path, small_tokenizer: Path) -> None:
    raw, tokenized = pair
    assert list(raw) == list(tokenized) == ["code", "en", "zh"]
    assert open_token_corpus(tokens).tokenizer_fingerprint == load_tokenizer(small_tokenizer).fingerprint
    for name in raw:
        one, other = raw[name], tokenized[name]
        assert (one.name, one.num_documents, one.num_bytes) == (other.name, other.num_documents, other.num_bytes)
        assert one.fingerprint == other.fingerprint
        assert one.document_sizes().tolist() == other.document_sizes().tolist()
        assert one.document_sizes().sum() == one.num_bytes
        left, right = one.open_block(0, one.num_documents), other.open_block(0, one.num_documents)
        for number in range(one.num_documents):
            np.testing.assert_array_equal(left.tokens(number), right.tokens(number))
            assert len(right.tokens(number)) == len(left.tokens(number))
            assert one.location(number) == other.location(number)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_block_is_the_same_as_from_text(pair: Pair, data: st.DataObject) -> None:
    raw, tokenized = pair
    name = data.draw(st.sampled_from(sorted(raw)))
    first = data.draw(st.integers(0, raw[name].num_documents - 1))
    end = data.draw(st.integers(first + 1, min(first + 12, raw[name].num_documents)))
    left, right = raw[name].open_block(first, end), tokenized[name].open_block(first, end)
    for number in data.draw(st.permutations(range(end - first))):
        np.testing.assert_array_equal(left.tokens(number), right.tokens(number))


DOCUMENTS = st.lists(st.lists(st.integers(0, 99), max_size=6).map(lambda ids: [*ids, 100]), min_size=1, max_size=6)


@settings(deadline=None, max_examples=40)
@given(shards=st.lists(DOCUMENTS, min_size=1, max_size=4), data=st.data())
@pytest.mark.parametrize("shift", [0, 65_436, 100_000], ids=["uint16", "uint16, full", "uint32"])
def test_blocks_may_span_several_shards(
    tmp_path_factory: pytest.TempPathFactory, shift: int, shards: list[list[list[int]]], data: st.DataObject
) -> None:
    shards = [[[token + shift - (shift == 65_436) for token in document] for document in shard] for shard in shards]
    limit = 101 + shift - (shift == 65_436)
    folder = write_token_corpus(tmp_path_factory.mktemp("straddle"), shards, limit - 1, limit)
    domain = open_token_corpus(folder).domains["d"]
    flat = [document for shard in shards for document in shard]
    places = [(f"d-{number:05d}.jsonl", record) for number, shard in enumerate(shards) for record in range(len(shard))]
    assert (domain.num_documents, domain.num_bytes) == (len(flat), sum(range(100, 100 + len(shards))))
    assert [domain.location(number) for number in range(len(flat))] == places
    first = data.draw(st.integers(0, len(flat) - 1))
    end = data.draw(st.integers(first + 1, len(flat)))
    block = domain.open_block(first, end)
    assert [block.tokens(number).tolist() for number in range(end - first)] == flat[first:end]
    assert [len(block.tokens(number)) for number in range(end - first)] == [len(one) for one in flat[first:end]]


def test_the_files_match_the_format_and_the_manifest(pair: Pair, tokens: Path) -> None:
    manifest = load_token_manifest(tokens)
    done = dict.fromkeys(manifest.domain_fingerprints, 0)
    for shard in manifest.shards:
        flat = np.memmap(tokens / shard.tokens_file, dtype=manifest.dtype, mode="r")
        ends = np.memmap(tokens / shard.ends_file, dtype=np.uint64, mode="r")
        assert (len(flat), len(ends), int(ends[-1])) == (shard.tokens, shard.documents, shard.tokens)
        block = pair[0][shard.domain].open_block(done[shard.domain], done[shard.domain] + shard.documents)
        for number in range(shard.documents):
            begin = int(ends[number - 1]) if number else 0
            np.testing.assert_array_equal(flat[begin : int(ends[number])], block.tokens(number))
        done[shard.domain] += shard.documents
        for name, digest in ((shard.tokens_file, shard.tokens_sha256), (shard.ends_file, shard.ends_sha256)):
            assert hashlib.sha256((tokens / name).read_bytes()).hexdigest() == digest


def test_tokens_are_read_only(pair: Pair) -> None:
    document = pair[1]["zh"].open_block(0, 1).tokens(0)
    with pytest.raises(ValueError, match="read-only"):
        document[0] = 1


def test_a_domain_can_be_pickled(pair: Pair) -> None:
    domain = pair[1]["code"]
    copy = pickle.loads(pickle.dumps(domain))
    np.testing.assert_array_equal(copy.open_block(9, 10).tokens(0), domain.open_block(9, 10).tokens(0))


def test_a_damaged_file_of_sizes_is_reported(tokens: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tokens, tmp_path / "t")
    domain, file = open_token_corpus(folder).domains["en"], folder / "en-00000.jsonl.sizes"
    os.truncate(file, 8)
    with pytest.raises(DataError, match=r"en-00000\.jsonl\.sizes: the file has 8 bytes instead of \d+"):
        domain.document_sizes()
    file.unlink()
    with pytest.raises(DataError, match=r"en-00000\.jsonl\.sizes: cannot be read \(No such file"):
        domain.document_sizes()


@pytest.mark.parametrize("kind", ["tokens", "ends"])
def test_other_valid_tokens_and_ends_are_found_by_their_checksum(tokens: Path, tmp_path: Path, kind: str) -> None:
    folder = shutil.copytree(tokens, tmp_path / "t")
    manifest, name = load_token_manifest(folder), f"en-00000.jsonl.{kind}"
    dtype = manifest.dtype if kind == "tokens" else np.uint64
    values = np.fromfile(folder / name, dtype)
    values[0] = values[0] + 1 if kind == "ends" else values[0] ^ 1
    values.tofile(folder / name)
    open_token_corpus(folder).domains["en"].open_block(0, 1)
    domain = open_token_corpus(folder, verify=True).domains["en"]
    domain.open_block(0, 1)
    wait_until(lambda: VERIFIER._thread is None)
    with pytest.raises(DataError, match=rf"{name}: its SHA-256 differs from the manifest.*`z2all corpus tokenize`"):
        domain.open_block(1, 2)


def test_other_valid_sizes_are_found_when_they_are_read(tokens: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tokens, tmp_path / "t")
    file = folder / "en-00000.jsonl.sizes"
    sizes = np.fromfile(file, np.uint64)
    sizes[:2] += np.array([1, -1]).astype(np.uint64)
    sizes.tofile(file)
    assert open_token_corpus(folder).domains["en"].document_sizes()[0] == sizes[0]
    with pytest.raises(DataError, match=r"en-00000\.jsonl\.sizes: its SHA-256 differs from the manifest"):
        open_token_corpus(folder, verify=True).domains["en"].document_sizes()
    assert len(open_token_corpus(folder, verify=True).domains["zh"].document_sizes())


def test_only_folders_with_a_token_manifest_are_token_corpora(tokens: Path, small_corpus: Path, tmp_path: Path) -> None:
    found = [is_token_corpus(folder) for folder in (tokens, str(tokens), small_corpus, tmp_path, tmp_path / "none")]
    assert found == [True, True, False, False, False]
    with pytest.raises(DataError, match=r"TOKENS\.json: no such file; it is written after all tokens\."):
        open_token_corpus(tmp_path)


# Object stores


@pytest.fixture
def in_memory(tokens: Path, tmp_path: Path) -> str:
    """Copy the token folder to fsspec's in-memory store and return its URL."""
    import fsspec

    system, url = fsspec.filesystem("memory"), f"memory://{tmp_path.name}/t"
    for name, data in files_in(tokens).items():
        system.pipe_file(f"/{tmp_path.name}/t/{name}", data)
    return url


def test_object_stores_give_the_same_documents(pair: Pair, in_memory: str) -> None:
    assert is_token_corpus(in_memory)
    for name, domain in open_token_corpus(in_memory).domains.items():
        block, expected = (one.open_block(3, domain.num_documents) for one in (domain, pair[1][name]))
        for number in reversed(range(domain.num_documents - 3)):
            np.testing.assert_array_equal(block.tokens(number), expected.tokens(number))


def test_a_block_of_an_object_store_is_fetched_when_it_is_opened(pair: Pair, in_memory: str) -> None:
    import fsspec

    block = open_token_corpus(in_memory).domains["en"].open_block(2, 6)
    fsspec.filesystem("memory").rm(in_memory.removeprefix("memory://"), recursive=True)
    np.testing.assert_array_equal(block.tokens(3), pair[1]["en"].open_block(5, 6).tokens(0))


def test_a_truncated_object_is_reported(in_memory: str) -> None:
    import fsspec

    system, name = fsspec.filesystem("memory"), f"{in_memory.removeprefix('memory://')}/zh-00000.jsonl.tokens"
    system.pipe_file(f"/{name}", system.cat_file(f"/{name}")[:-2])
    with pytest.raises(DataError, match=r"memory://.*zh-00000\.jsonl\.tokens, record 4: the file has \d+ bytes"):
        open_token_corpus(in_memory).domains["zh"].open_block(4, 5)


# Damaged files


SHARDS = [[[1, 2, 9], [9], [3, 4, 5, 9], [6, 9]], [[7, 9], [8, 8, 9]]]
TOKENS, ENDS = "d-00000.jsonl.tokens", "d-00000.jsonl.ends"


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return write_token_corpus(tmp_path / "b", SHARDS, eot_id=9, tokenizer_size=10)


def put(name: str, place: int, value: int, dtype: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        values = np.fromfile(folder / name, dtype)
        values[place] = value
        values.tofile(folder / name)

    return change


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


@pytest.mark.parametrize(
    ("damage", "record", "message"),
    [
        (lambda folder: (folder / TOKENS).unlink(), 1, f"{TOKENS}, record 1: the tokens cannot be read (No such file"),
        (lambda folder: (folder / ENDS).unlink(), 1, f"{ENDS}, record 1: the ends cannot be read (No such file"),
        (cut(TOKENS, 18), 2, f"{TOKENS}, record 2: the file has 18 bytes, the manifest says 20."),
        (cut(TOKENS, 0), 0, f"{TOKENS}, record 0: the file has 0 bytes, the manifest says 20."),
        (cut(ENDS, 20), 2, f"{ENDS}, record 2: the file of 4 ends is cut off at byte 20."),
        (put(TOKENS, 7, 8, "<u2"), 2, f"{TOKENS}, record 2: the document ends with token 8 instead of 9, the end of"),
        (put(TOKENS, 5, 10, "<u2"), 2, f"{TOKENS}, record 2: token 10 is not one of the 10 of the tokenizer."),
        (put(TOKENS, 5, 65535, "<u2"), 2, f"{TOKENS}, record 2: token 65535 is not one of the 10 of the tokenizer."),
        (put(ENDS, 2, 4, "<u8"), 2, f"{ENDS}, record 2: the ends of the documents are not increasing."),
        (put(ENDS, 2, 3, "<u8"), 2, f"{ENDS}, record 2: the ends of the documents are not increasing."),
        (put(ENDS, 2, 11, "<u8"), 2, f"{ENDS}, record 2: the document ends at token 11 of 10."),
        (put(ENDS, 2, 2**64 - 1, "<u8"), 2, f"{ENDS}, record 2: the document ends at token {2**64 - 1} of 10."),
        (put(ENDS, 2, 7, "<u8"), 2, f"{TOKENS}, record 2: the document ends with token 5 instead of 9, the end of"),
        (put(ENDS, 3, 9, "<u8"), 3, f"{ENDS}, record 3: the document ends at token 9 of 10."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("whole", [True, False])
def test_damage_is_reported_with_its_record(
    broken: Path,
    damage: Callable[[Path], None],
    record: int,
    message: str,
    whole: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not whole:
        monkeypatch.setattr(reading, "READ_WHOLE_BYTES", 0)
    damage(broken)
    domain = open_token_corpus(broken).domains["d"]
    with pytest.raises(DataError) as caught:
        domain.open_block(record, record + 1).tokens(0)
    assert str(caught.value).startswith(f"{broken}/{message}")
    assert "z2all corpus tokenize" in str(caught.value)
    assert domain.open_block(4, 6).tokens(1).tolist() == [8, 8, 9]  # the other shard is intact


def test_a_damaged_record_within_a_block_is_reported(broken: Path) -> None:
    put("d-00001.jsonl.tokens", 4, 1, "<u2")(broken)
    block = open_token_corpus(broken).domains["d"].open_block(2, 6)
    assert [block.tokens(number).tolist() for number in range(3)] == [[3, 4, 5, 9], [6, 9], [7, 9]]
    with pytest.raises(DataError, match=r"d-00001\.jsonl\.tokens, record 1: the document ends with token 1"):
        block.tokens(3)


def test_a_file_that_shrinks_while_a_block_is_open_is_an_error(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "READ_WHOLE_BYTES", 0)  # otherwise the block is read when it is opened
    block = open_token_corpus(broken).domains["d"].open_block(0, 4)
    assert block.tokens(1).tolist() == [9]
    os.truncate(broken / TOKENS, 10)
    assert block.tokens(0).tolist() == [1, 2, 9]
    rule = r"record 2: the file was cut off at byte 10 while it was read\. Do not change a corpus while a run reads it"
    with pytest.raises(DataError, match=rule):
        block.tokens(2)


def test_a_replaced_file_is_read_by_the_next_block(broken: Path, tmp_path: Path) -> None:
    domain = open_token_corpus(broken).domains["d"]
    assert domain.open_block(0, 1).tokens(0).tolist() == [1, 2, 9]
    shutil.copy(broken / TOKENS, tmp_path / "new")
    put("new", 0, 5, "<u2")(tmp_path)
    os.replace(tmp_path / "new", broken / TOKENS)
    assert domain.open_block(0, 1).tokens(0).tolist() == [5, 2, 9]
