"""Records by number, the index cache, and shards that break."""

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpus_maker import write_shard
from z2all_ds.data import readers
from z2all_ds.data.readers import DomainReader, JsonlShard, index_path, load_or_build_index, open_domains, open_shard
from z2all_ds.errors import DataError


def test_reads_in_any_order(tmp_path: Path) -> None:
    texts = ["第一", "", "three\nlines\n", "four " * 1000]
    info = write_shard(tmp_path, "web", 0, texts)
    shard = JsonlShard(tmp_path / info.path, info)
    assert shard.num_documents == 4
    for number in (2, 0, 3, 1, 2):
        record = shard.read(number)
        assert (record["gid"], record["content"], record["title"]) == (number, texts[number], "题")


@settings(max_examples=30, deadline=None)
@given(
    lines=st.lists(st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"")), max_size=12),
    last_newline=st.booleans(), chunk=st.integers(1, 30),
)  # fmt: skip
def test_index_finds_every_line(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], last_newline: bool, chunk: int
) -> None:
    path = tmp_path_factory.mktemp("index") / "x.jsonl"
    content = b"\n".join(lines) + (b"\n" if last_newline and lines else b"")
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_SCAN_CHUNK_BYTES", chunk)
        offsets = load_or_build_index(path).tolist()
    expected = [line + b"\n" for line in content.split(b"\n")]
    expected[-1] = expected[-1][:-1]  # what stands after the last newline is a line only if it is anything
    assert [content[a:b] for a, b in pairwise(offsets)] == [line for line in expected if line]
    assert offsets[-1] == len(content)


def test_index_is_kept_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / write_shard(tmp_path, "web", 0, ["a", "b"]).path
    JsonlShard(path).read(0)
    assert index_path(path).name == ".web-00000.jsonl.idx.npy"
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []
    monkeypatch.setattr(readers, "_scan_for_lines", lambda _: pytest.fail("the cached index was not used"))
    assert JsonlShard(path).read(1)["content"] == "b"


def test_index_is_made_again_when_the_file_changed(tmp_path: Path) -> None:
    path = tmp_path / write_shard(tmp_path, "web", 0, ["aaaa", "b"]).path
    assert JsonlShard(path).read(1)["content"] == "b"
    size = path.stat().st_size
    write_shard(tmp_path, "web", 0, ["a", "bbbb"])  # the same size, other lines
    assert path.stat().st_size == size
    os.utime(path, ns=(0, 12345))  # clocks of file systems may be too coarse for a test
    assert JsonlShard(path).read(1)["content"] == "bbbb"
    write_shard(tmp_path, "web", 0, ["a", "b", "c"])
    assert JsonlShard(path).num_documents == 3


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY torn", b"junk"])
def test_torn_index_is_made_again(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / write_shard(tmp_path, "web", 0, ["a", "b"]).path
    index_path(path).write_bytes(content)
    assert JsonlShard(path).read(1)["content"] == "b"
    assert np.load(index_path(path))[-1] == path.stat().st_size


def test_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / write_shard(tmp_path, "web", 0, ["a", "b"]).path

    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(readers.os, "replace", refuse)
    assert JsonlShard(path).read(1)["content"] == "b"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def break_vanish(path: Path) -> None:
    path.unlink()


def break_shrink(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def break_json(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'{"gid": 1', b'?"gid": 1'))


def break_content(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"content": "b"', b'"content": 123'))


@pytest.mark.parametrize("opened_before", [False, True])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (break_vanish, ["cannot be read", "No such file"]),
        (break_shrink, ["bytes"]),
        (break_json, ["not JSON"]),
        (break_content, ["`content` must be a text and is int"]),
    ],
)
def test_broken_shards_are_named(
    tmp_path: Path, damage: Callable[[Path], None], words: list[str], opened_before: bool
) -> None:
    info = write_shard(tmp_path, "web", 0, ["a", "b"])
    domain = DomainReader("web", tmp_path, [info])
    if opened_before:
        domain.read(0)
    damage(tmp_path / info.path)
    with pytest.raises(DataError) as caught:
        domain.read(1)
    for word in [f"{info.path}, record 1", *words]:
        assert word in str(caught.value), caught.value


def test_shard_must_be_the_one_of_the_manifest(tmp_path: Path) -> None:
    info = write_shard(tmp_path, "web", 0, ["a", "b", "c"])
    write_shard(tmp_path, "web", 0, ["a", "b"])
    with pytest.raises(DataError, match=r"has 2 records in .* manifest says 3 in"):
        DomainReader("web", tmp_path, [info]).read(2)


def test_unknown_format_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no reader for '\.csv'.*\.jsonl"):
        open_shard(tmp_path / "x.csv", SimpleNamespace(path="x.csv", domain="web", documents=1, bytes=1))


def test_domain_numbers_documents_through_its_shards(tmp_path: Path) -> None:
    shards = [
        write_shard(tmp_path, "web", 0, ["w0", "w1"]), write_shard(tmp_path, "code", 0, ["c0"]),
        write_shard(tmp_path, "web", 1, []), write_shard(tmp_path, "web", 2, ["w2"]),
    ]  # fmt: skip
    domains = open_domains(tmp_path, shards)
    assert list(domains) == ["code", "web"]
    assert domains["web"].num_documents == 3
    assert [domains["web"].read(n) for n in range(3)] == ["w0", "w1", "w2"]
    assert not index_path(tmp_path / shards[1].path).exists(), "a shard nobody read was scanned"


def test_corpus_without_documents(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no documents"):
        open_domains(tmp_path, [write_shard(tmp_path, "web", 0, [])])
