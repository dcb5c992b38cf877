"""Shards from parts: for any lengths, masks and sizes, every document that stays, once, in order, within the limit."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.corpus import shards as shards_module
from z2all_ds.corpus.shards import Part, numbered_bytes, plan_shards, write_shard
from z2all_ds.errors import DataError

LIMIT = 300


def write_part(folder: Path, number: int, texts: list[str], keep: list[bool]) -> Part:
    lines = [json.dumps({"content": text}, ensure_ascii=False).encode() + b"\n" for text in texts]
    path = folder / f"{number}.lines"
    path.write_bytes(b"".join(lines))
    np.array([len(line) for line in lines], dtype=np.uint32).tofile(path.with_suffix(".lengths"))
    if all(keep):
        return Part(str(path), len(texts))
    np.array(keep, dtype=np.bool_).tofile(path.with_suffix(".keep"))
    return Part(str(path), len(texts), str(path.with_suffix(".keep")))


documents = st.lists(st.tuples(st.text("a文\n", max_size=40), st.booleans()), max_size=12)


@settings(max_examples=60)
@given(st.lists(documents, max_size=4), st.integers(0, 10**12), st.sampled_from([1, 150, 10**6]))
def test_any_parts(
    tmp_path_factory: pytest.TempPathFactory, given_parts: list[list[tuple[str, bool]]], first_gid: int, read: int
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    parts = [
        write_part(folder, number, [text for text, _ in some], [stays for _, stays in some])
        for number, some in enumerate(given_parts)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_module, "BLOCK_BYTES", read)
        infos = [write_shard(task) for task in plan_shards(parts, folder, "d", "d", first_gid, LIMIT)]
    found, sizes = [], []
    for info in infos:
        data = (folder / info.path).read_bytes()
        lines = data.splitlines(keepends=True)
        assert (info.documents, info.bytes) == (len(lines), len(data))
        assert info.sha256 == hashlib.sha256(data).hexdigest()
        assert info.bytes <= LIMIT
        sizes.append(info.bytes)
        found += [json.loads(line) for line in lines]
    everything = [(text, stays) for some in given_parts for text, stays in some]
    stay = [(number, text) for number, (text, stays) in enumerate(everything) if stays]
    assert [(record["id"], record["content"]) for record in found] == stay
    assert [record["gid"] for record in found] == list(range(first_gid, first_gid + len(stay)))
    # filled: no two neighbours would have fitted into one
    assert all(one + other > LIMIT for one, other in pairwise(sizes)) or len(sizes) < 2


@given(st.integers(0, 10**17), st.integers(0, 10**17))
def test_numbered_bytes(gid: int, number: int) -> None:
    line = b'{"content":"x"}\n'
    whole = b'{"gid":%d,"id":%d,"data_src":"zh","content":"x"}\n' % (gid, number)
    assert numbered_bytes(np.array([len(line)]), np.array([gid]), np.array([number]), "zh").tolist() == [len(whole)]


def test_a_shard_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    part = write_part(tmp_path, 0, ["a", "b"], [True, True])
    (task,) = plan_shards([part], tmp_path, "d", "d", 0, LIMIT)
    first = write_shard(task)
    (tmp_path / "0.lines").unlink()
    assert write_shard(task) == first


def test_a_document_larger_than_a_shard_is_named(tmp_path: Path) -> None:
    part = write_part(tmp_path, 0, ["a", "b" * LIMIT], [True, True])
    with pytest.raises(DataError, match=r"document 1 of domain d: 3\d\d bytes of JSON, more than a whole shard"):
        plan_shards([part], tmp_path, "d", "d", 0, LIMIT)
