"""Tests of reading the documents of a domain by number and in blocks, on disk and in object stores."""

import json
import multiprocessing
import os
import pickle
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.reading.shard_maker import reader_of, texts_of, write_jsonl, write_parquet
from z2all_ds.base.errors import BadRecordError, DataError
from z2all_ds.corpus.adopt import adopt_corpus
from z2all_ds.corpus.executors import Executor
from z2all_ds.corpus.manifest import MANIFEST_NAME, Manifest, ShardInfo, load_manifest, write_manifest
from z2all_ds.corpus.reading.readers import DomainReader, open_domains
from z2all_ds.corpus.reading.skipping import BAD_RECORDS

TEXTS = ["第一", "", "three\nlines\n", "four " * 1000, "five", "\u2028", "seven"]


def mixed_shards(folder: Path) -> list[ShardInfo]:
    """Write TEXTS to shards of both formats, some of them empty."""
    return [
        write_jsonl(folder, "a.jsonl", TEXTS[:2]),
        write_jsonl(folder, "b.jsonl", []),
        write_parquet(folder, "sub/c.parquet", TEXTS[2:5], row_group_size=2),
        write_parquet(folder, "d.parquet", []),
        write_jsonl(folder, "e.jsonl", TEXTS[5:], last=""),
    ]


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=20),
    data=st.data(),
)
def test_any_block_gives_the_texts_of_the_files(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("blocks")
    shards: list[ShardInfo] = []
    rest = list(texts)
    while rest:
        size = data.draw(st.integers(1, len(rest)), "documents of the shard")
        number, (part, rest) = len(shards), (rest[:size], rest[size:])
        if data.draw(st.booleans(), "is parquet"):
            group = data.draw(st.integers(1, size), "rows of a group")
            shards.append(write_parquet(folder, f"{number}.parquet", part, row_group_size=group))
        else:
            last = data.draw(st.sampled_from(["", "\n"]), "end of the file")
            shards.append(write_jsonl(folder, f"{number}.jsonl", part, last=last))
    reader = reader_of(folder, *shards)
    first = data.draw(st.integers(0, len(texts) - 1), "first")
    end = data.draw(st.integers(first + 1, len(texts)), "end")
    block = reader.open_block(first, end)
    order = data.draw(st.permutations(range(end - first)), "order")
    assert {number: block.text(number) for number in order} == dict(enumerate(texts[first:end]))
    for shard in shards:
        if shard.path.endswith(".jsonl"):
            plain = [json.loads(line)["content"] for line in (folder / shard.path).read_bytes().split(b"\n") if line]
            before = sum(other.documents for other in shards[: shards.index(shard)])
            assert [reader.read(before + number) for number in range(len(plain))] == plain


def test_documents_are_numbered_across_shards(tmp_path: Path) -> None:
    shards = mixed_shards(tmp_path)
    reader = reader_of(tmp_path, *shards)
    assert (reader.num_documents, reader.num_bytes) == (7, sum(shard.bytes for shard in shards))
    for block_documents in range(1, 8):
        assert texts_of(reader, block_documents) == TEXTS
    assert [reader.read(number) for number in (6, 0, 3)] == [TEXTS[6], TEXTS[0], TEXTS[3]]
    places = [("a.jsonl", 0), ("a.jsonl", 1), *(("sub/c.parquet", n) for n in range(3)), ("e.jsonl", 0), ("e.jsonl", 1)]
    assert [reader.locate(number) for number in range(7)] == places


@pytest.mark.parametrize("location", ["{}", "file://{}", "memory://mixed"])
def test_paths_and_urls_give_the_same_texts(tmp_path: Path, location: str) -> None:
    write_manifest(tmp_path, Manifest(1, tuple(mixed_shards(tmp_path))))
    if location.startswith("memory"):
        memory = fsspec.filesystem("memory")
        for path in (path for path in tmp_path.rglob("*") if path.is_file()):
            memory.pipe_file(f"/mixed/{path.relative_to(tmp_path).as_posix()}", path.read_bytes())
    location = location.format(tmp_path)
    (reader,) = open_domains(location, load_manifest(location)).values()
    for _ in range(2):  # the second pass uses the indexes written by the first
        for block_documents in (1, 3, 7):
            assert texts_of(reader, block_documents) == TEXTS
    assert reader.fingerprint == load_manifest(tmp_path).domain_fingerprints["web"]


def test_domains_are_sorted_by_name_and_empty_ones_left_out(tmp_path: Path) -> None:
    shards = [
        write_jsonl(tmp_path, "w0.jsonl", ["w0", "w1"]),
        write_jsonl(tmp_path, "c0.jsonl", ["c0"], "code"),
        write_jsonl(tmp_path, "n0.jsonl", [], "nothing"),
        write_jsonl(tmp_path, "w1.jsonl", ["w2"]),
    ]
    manifest = Manifest(1, tuple(shards))
    domains = open_domains(tmp_path, manifest)
    assert list(domains) == ["code", "web"]
    assert {name: texts_of(domain) for name, domain in domains.items()} == {"code": ["c0"], "web": ["w0", "w1", "w2"]}
    assert {name: domain.fingerprint for name, domain in domains.items()} == manifest.domain_fingerprints
    with pytest.raises(DataError, match="no documents"):
        open_domains(tmp_path, replace(manifest, shards=(shards[2],)))


def test_opening_a_corpus_does_not_read_its_shards(tmp_path: Path) -> None:
    (domain,) = open_domains(tmp_path, Manifest(1, (ShardInfo("not/there.jsonl", "web", 5, 10, "0" * 64),))).values()
    assert domain.num_documents == 5
    with pytest.raises(DataError, match=r"not/there\.jsonl, record 3: the shard cannot be read \(No such file"):
        domain.read(3)


def test_the_text_field_may_have_another_name(tmp_path: Path) -> None:
    shards = [
        write_jsonl(tmp_path, "a.jsonl", ["a", "b"], text_field="text"),
        write_parquet(tmp_path, "c.parquet", ["c"], text_field="text"),
    ]
    manifest = Manifest(1, tuple(shards), text_field="text")
    (domain,) = open_domains(tmp_path, manifest).values()
    assert texts_of(domain) == ["a", "b", "c"]
    assert domain.fingerprint == manifest.domain_fingerprints["web"]
    (wrong,) = open_domains(tmp_path, Manifest(1, tuple(shards))).values()
    for number, place in ((1, "a.jsonl, record 1"), (2, "c.parquet, record 0")):
        with pytest.raises(DataError, match=rf"{place}: has no field `content`; its fields are: gid, text"):
            wrong.read(number)


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.json.gz", "x.jsonl.zst", "x.jsonl.bz2", "x.jsonl.xz"])
def test_compressed_shards_are_refused_with_advice(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=rf"{name}.*packed.*Unpack it, or .*z2all corpus convert"):
        reader_of(tmp_path, ShardInfo(name, "web", 1, 1, "0" * 64))


@pytest.mark.parametrize("name", ["x.csv", "x.json", "x"])
def test_unknown_formats_are_refused_with_a_list_of_known_formats(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"no reader for .*\.jsonl, \.parquet"):
        reader_of(tmp_path, ShardInfo(name, "web", 1, 1, "0" * 64))


def _read_there(reader: DomainReader) -> list[str]:
    return texts_of(reader)


def test_readers_can_be_pickled_and_sent_to_spawned_workers(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, *mixed_shards(tmp_path))
    fresh = len(pickle.dumps(reader))
    assert texts_of(reader) == TEXTS
    assert len(pickle.dumps(reader)) == fresh, "what was opened went along"
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(_read_there, reader).result() == TEXTS


def test_bad_records_are_skipped_and_counted_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"content": "a"}\n{"content": null}\nbroken\n')
    manifest = adopt_corpus(tmp_path, executor=Executor(1), on_error="skip")
    with pytest.raises(BadRecordError, match="record 1"):
        open_domains(tmp_path, manifest)["bad"].read(1)
    before = BAD_RECORDS["bad"]
    reader = open_domains(tmp_path, manifest, "skip")["bad"]
    assert [reader.read(number) for number in (0, 1, 2, 1, 2)] == ["a", "", "", "", ""]
    assert BAD_RECORDS["bad"] - before == 2
    assert "record 1: `content` must be a string" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").unlink()
    with pytest.raises(DataError, match="cannot be read"):  # a lost file is not a bad record
        open_domains(tmp_path, manifest, "skip")["bad"].read(1)


def test_a_fifo_in_place_of_a_shard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"content": "a"}\n')
    manifest = adopt_corpus(tmp_path, executor=Executor(1))
    (tmp_path / "a.jsonl").unlink()
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="not a regular file"):
        open_domains(tmp_path, manifest)["a"].read(0)
    (tmp_path / MANIFEST_NAME).unlink()
    os.mkfifo(tmp_path / MANIFEST_NAME)
    with pytest.raises(DataError, match="not a regular file"):
        load_manifest(tmp_path)
