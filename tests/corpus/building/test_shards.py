"""Tests of making shards from parts: they contain all selected documents once, in order, within the size limit."""

import hashlib
import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.base.errors import DataError
from z2all_ds.corpus.building import shards as shards_module
from z2all_ds.corpus.building.parts import Part
from z2all_ds.corpus.building.shards import make_shard, plan_shards

LIMIT = 300


def write_part(folder: Path, number: int, texts: list[str], keep: list[bool]) -> Part:
    lines = [json.dumps({"content": text}, ensure_ascii=False).encode() + b"\n" for text in texts]
    path = folder / f"{number}.lines"
    data = b"".join(lines)
    path.write_bytes(data)
    np.array([len(line) for line in lines], dtype=np.uint32).tofile(path.with_suffix(".lengths"))
    values = (str(path), number * 1000, len(texts), len(data), hashlib.sha256(data).hexdigest())
    if all(keep):
        return Part(*values)
    np.array(keep, dtype=np.bool_).tofile(path.with_suffix(".keep"))
    return Part(*values, str(path.with_suffix(".keep")))


documents = st.lists(st.tuples(st.text("a文\n", max_size=40), st.booleans()), max_size=12)


@settings(max_examples=100)
@given(st.lists(documents, max_size=4), st.sampled_from([1, 150, 10**6]), st.sampled_from([1, 4, 10**6]))
def test_shards_contain_the_selected_documents_of_any_parts_in_order(
    tmp_path_factory: pytest.TempPathFactory, given_parts: list[list[tuple[str, bool]]], block: int, share: int
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    parts = [
        write_part(folder, number, [text for text, _ in some], [stays for _, stays in some])
        for number, some in enumerate(given_parts)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_module, "BLOCK_BYTES", block)
        patch.setattr(shards_module, "SMALLEST_SHARE", share)
        tasks = plan_shards(parts, folder, "d", "d", LIMIT)
        infos = [make_shard(task) for task in tasks]
    found, sizes = [], []
    for info in infos:
        data = (folder / info.path).read_bytes()
        lines = data.splitlines(keepends=True)
        assert (info.documents, info.bytes) == (len(lines), len(data))
        assert info.sha256 == hashlib.sha256(data).hexdigest()
        assert 0 < info.bytes <= LIMIT
        sizes.append(info.bytes)
        found += [json.loads(line)["content"] for line in lines]
    assert found == [text for some in given_parts for text, stays in some if stays]
    # Shards are full: two neighbours would fit into one shard only if one of them is a whole part.
    whole = [len(task.slices) == 1 and task.slices[0].is_whole_part for task in tasks]
    for one, other in pairwise(range(len(tasks))):
        assert sizes[one] + sizes[other] > LIMIT or whole[one] or whole[other]


def test_a_large_part_becomes_a_shard_by_a_hard_link(tmp_path: Path) -> None:
    large, small = write_part(tmp_path, 0, ["a" * 100], [True]), write_part(tmp_path, 1, ["b"], [True])
    tasks = plan_shards([large, small, small, large], tmp_path, "d", "d", LIMIT)
    assert [[one.part for one in task.slices] for task in tasks] == [[large], [small, small], [large]]
    info = make_shard(tasks[0])
    assert (tmp_path / info.path).samefile(large.path)


def test_a_part_is_copied_on_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = write_part(tmp_path, 0, ["a" * 100], [True])
    (task,) = plan_shards([part], tmp_path, "d", "d", LIMIT)
    linked = make_shard(task)
    (tmp_path / linked.path).unlink()
    (tmp_path / linked.path).with_suffix(".json").unlink()

    def no_link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)
    assert make_shard(task) == linked
    assert not (tmp_path / linked.path).samefile(part.path)


def test_a_finished_shard_is_not_made_again(tmp_path: Path) -> None:
    part = write_part(tmp_path, 0, ["a", "b"], [True, True])
    (task,) = plan_shards([part], tmp_path, "d", "d", LIMIT)
    first = make_shard(task)
    (tmp_path / "0.lines").unlink()
    assert make_shard(task) == first


def test_a_document_larger_than_a_shard_is_reported(tmp_path: Path) -> None:
    parts = [write_part(tmp_path, 0, ["a"], [True]), write_part(tmp_path, 1, ["a", "b" * LIMIT], [True, True])]
    with pytest.raises(DataError, match=r"document 1001 of domain d: 3\d\d bytes of JSON, more than a whole shard"):
        plan_shards(parts, tmp_path, "d", "d", LIMIT)


def test_a_truncated_part_is_reported(tmp_path: Path) -> None:
    part = write_part(tmp_path, 0, ["a", "b", "c"], [True, False, True])
    (task,) = plan_shards([part], tmp_path, "d", "d", LIMIT)
    os.truncate(part.path, 30)
    with pytest.raises(DataError, match="is shorter than when it was written"):
        make_shard(task)
    assert not list(tmp_path.glob("d-*"))
