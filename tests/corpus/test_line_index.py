"""Tests of the line index of a shard: it is correct, stored, and rebuilt when necessary."""

import io
import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.stores import FlakyStore, flaky_store, put
from z2all_ds.base.storage import Folder, Stamp, folders, open_folder
from z2all_ds.corpus import line_index
from z2all_ds.corpus.line_index import (
    IndexDamaged,
    LineIndex,
    LineScan,
    build_index,
    index_name,
    load_index,
    load_or_build_index,
)

CONTENT = b"first\n\nthird line\nlast without end"
LINES = [0, 6, 7, 18, 34]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "x.jsonl").write_bytes(CONTENT)
    return open_folder(tmp_path)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FlakyStore]]:
    monkeypatch.setattr(folders, "FIRST_WAIT_SECONDS", 0.001)
    with flaky_store() as store:
        yield store


def index_of(folder: Folder, shard: str = "x.jsonl") -> LineIndex:
    return load_or_build_index(folder, shard, folder.stamp(shard))


def all_offsets(index: LineIndex) -> list[int]:
    return index.offsets(0, index.num_lines).tolist()


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=60).map(lambda b: b.replace(b"\x01", b"\n").replace(b"a", b"\n")), data=st.data())
def test_every_line_is_found_whatever_the_chunk_sizes(content: bytes, data: st.DataObject) -> None:
    scan, position = LineScan(), 0
    while position < len(content):
        step = data.draw(st.integers(1, len(content) - position))
        scan.feed(content[position : position + step])
        scan.feed(b"")
        position += step
    offsets = scan.offsets().tolist()
    assert [content[a:b] for a, b in pairwise(offsets)] == list(io.BytesIO(content))
    assert offsets[0] == 0 and offsets[-1] == len(content)
    assert scan.offsets().tolist() == offsets


def test_any_range_of_offsets_can_be_read(folder: Folder) -> None:
    index = index_of(folder)
    assert index.num_lines == 4
    for first in range(4):
        for end in range(first + 1, 5):
            assert index.offsets(first, end).tolist() == LINES[first : end + 1]


def test_small_reads_give_the_same_index(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_index, "SCAN_BYTES", 5)
    assert all_offsets(index_of(folder)) == LINES


def test_index_files_are_hidden() -> None:
    assert index_name("x.jsonl") == ".x.jsonl.idx"
    assert index_name("zh/a/x.jsonl") == "zh/a/.x.jsonl.idx"


def test_the_index_is_stored_and_reused(folder: Folder, tmp_path: Path) -> None:
    index_of(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x.jsonl.idx", "x.jsonl"]
    path = tmp_path / ".x.jsonl.idx"
    words = np.fromfile(path, dtype="<u8")
    words[5] = 4  # a wrong offset shows that the shard was not scanned again
    words.tofile(path)
    assert all_offsets(index_of(folder)) == [0, 4, 7, 18, 34]


def test_the_index_of_a_changed_shard_is_rebuilt(folder: Folder, tmp_path: Path) -> None:
    stamp = folder.stamp("x.jsonl")
    index_of(folder)
    (tmp_path / "x.jsonl").write_bytes(CONTENT.replace(b"first\n", b"fir\nst"))  # same size, different lines
    os.utime(tmp_path / "x.jsonl", ns=(0, stamp.version + 1))  # file system timestamps may be too coarse for this test
    assert load_index(folder, "x.jsonl", folder.stamp("x.jsonl")) is None
    assert all_offsets(index_of(folder)) == [0, 4, 7, 18, 34]
    (tmp_path / "x.jsonl").write_bytes(b"a\nb\n")
    assert all_offsets(index_of(folder)) == [0, 2, 4]


@pytest.mark.parametrize("keep", [0, 1, 8, 31, 32, 40, -8, -1])
def test_a_truncated_index_is_rebuilt(folder: Folder, tmp_path: Path, keep: int) -> None:
    index_of(folder)
    path = tmp_path / ".x.jsonl.idx"
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    assert all_offsets(index_of(folder)) == LINES
    assert path.read_bytes() == whole


@pytest.mark.parametrize("damage", ["truncated", "garbage", "backwards"])
def test_damage_to_an_open_index_is_detected(folder: Folder, tmp_path: Path, damage: str) -> None:
    index, path = index_of(folder), tmp_path / ".x.jsonl.idx"
    words = np.fromfile(path, dtype="<u8")
    if damage == "truncated":
        words = words[:-1]
    elif damage == "garbage":
        words[-1] = 2**60
    else:
        words[6] = 0
    with open(path, "r+b") as file:  # rewritten in place, because the index holds this file open
        file.truncate(0)
        file.write(words.tobytes())
    with pytest.raises(IndexDamaged, match=r"\.x\.jsonl\.idx"):
        all_offsets(index)


def test_an_index_that_cannot_be_written_stays_in_memory(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / ".x.jsonl.idx").mkdir()  # not even root can write a file over a folder
    index = index_of(folder)
    assert all_offsets(index) == LINES
    assert index.offsets(1, 3).tolist() == LINES[1:4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x.jsonl.idx", "x.jsonl"]


def _index_as_another_user(location: str, answers: Any) -> None:
    if os.geteuid() == 0:  # root could write to a read-only folder
        os.seteuid(65534)
    answers.put(all_offsets(index_of(open_folder(location))))


def test_in_a_read_only_folder_the_index_stays_in_memory() -> None:
    fork = get_context("fork")
    with TemporaryDirectory() as place:
        (Path(place) / "x.jsonl").write_bytes(CONTENT)
        os.chmod(place, 0o555)
        answers = fork.SimpleQueue()
        child = fork.Process(target=_index_as_another_user, args=(place, answers))
        child.start()
        child.join()
        assert (child.exitcode, answers.empty()) == (0, False)
        assert answers.get() == LINES
        assert os.listdir(place) == ["x.jsonl"]
        os.chmod(place, 0o755)


def test_the_index_of_a_growing_shard_is_not_stored(folder: Folder, tmp_path: Path) -> None:
    stamp = folder.stamp("x.jsonl")
    index = build_index(folder, "x.jsonl", Stamp(stamp.size - 3, stamp.version))
    assert index.stamp.size == stamp.size
    assert not (tmp_path / ".x.jsonl.idx").exists()


@pytest.mark.parametrize(("more", "lines"), [(-3, 4), (3, 6), (40, 43)])
def test_the_scan_ends_at_the_size_of_the_shard(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int, lines: int
) -> None:
    """Nothing is read beyond it; and the index is complete if the shard has grown or shrunk."""
    stamp, real, ranges = folder.stamp("x.jsonl"), folder.read_range, []

    def read_range(name: str, begin: int, end: int) -> bytes:
        ranges.append((begin, end))
        return real(name, begin, end)

    monkeypatch.setattr(folder, "read_range", read_range)
    assert build_index(folder, "x.jsonl", stamp).stamp == stamp
    assert ranges == [(0, stamp.size)]
    monkeypatch.undo()
    content = CONTENT[:more] if more < 0 else CONTENT + b"\n" * more
    (tmp_path / "x.jsonl").write_bytes(content)
    (tmp_path / ".x.jsonl.idx").unlink()
    index = build_index(folder, "x.jsonl", stamp)
    assert (index.stamp.size, index.num_lines) == (len(content), lines)
    assert not (tmp_path / ".x.jsonl.idx").exists()


def test_several_threads_can_write_the_same_index(folder: Folder, tmp_path: Path) -> None:
    stamp, found = folder.stamp("x.jsonl"), []
    threads = [threading.Thread(target=lambda: found.append(build_index(folder, "x.jsonl", stamp))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [all_offsets(index) for index in found] == [LINES] * 8
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x.jsonl.idx", "x.jsonl"]


def test_in_a_store_the_index_is_written_next_to_the_shard(flaky: type[FlakyStore]) -> None:
    put("flaky://c", {"zh/x.jsonl": CONTENT})
    folder = open_folder("flaky://c")
    assert all_offsets(index_of(folder, "zh/x.jsonl")) == LINES
    assert list(folder.list_files()) == ["zh/.x.jsonl.idx", "zh/x.jsonl"]
    flaky.calls.clear()
    assert all_offsets(index_of(folder, "zh/x.jsonl")) == LINES
    assert flaky.calls == ["info", "info", "cat_file", "cat_file"]  # shard, index, index header, offsets


def test_in_a_read_only_store_the_index_stays_in_memory(
    flaky: type[FlakyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    put("flaky://c", {"x.jsonl": CONTENT})
    monkeypatch.setattr(FlakyStore, "pipe_file", read_only)
    folder = open_folder("flaky://c")
    assert all_offsets(index_of(folder)) == LINES
    assert list(folder.list_files()) == ["x.jsonl"]


def read_only(*_: object, **__: object) -> None:
    raise NotImplementedError("read-only store")
