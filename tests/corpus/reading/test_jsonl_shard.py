"""Tests of reading blocks of JSON Lines: number of reads, and errors when the file changes while it is open."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.corpus.reading.shard_maker import reader_of, texts_of, write_jsonl
from tests.helpers.stores import FlakyStore, flaky_store, put
from z2all_ds.base.errors import DataError
from z2all_ds.base.storage import folders
from z2all_ds.base.storage.open_files import OPEN_FILES
from z2all_ds.corpus.reading import jsonl_shard


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FlakyStore]]:
    monkeypatch.setattr(folders, "FIRST_WAIT_SECONDS", 0.001)
    with flaky_store() as store:
        yield store


def vanish(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


def cut_to_the_first_line(path: Path) -> None:
    os.truncate(path, path.read_bytes().index(b"\n") + 1)


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b'{"content": "more"}\n')


def replaced_by_longer(path: Path) -> None:
    path.with_suffix(".new").write_bytes(b'{"content": "first and longer"}\n' + path.read_bytes())
    os.replace(path.with_suffix(".new"), path)


def in_place(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert len(old) == len(new) and old in data
    with open(path, "r+b") as file:
        file.seek(data.index(old))
        file.write(new)


def break_json(path: Path) -> None:
    in_place(path, b'{"gid": 2', b'?"gid": 2')


def break_type(path: Path) -> None:
    in_place(path, b'"content": "ccc"', b'"content": 12345')


def break_field(path: Path) -> None:
    in_place(path, b'"content": "ccc"', b'"contemt": "ccc"')


def break_utf8(path: Path) -> None:
    in_place(path, b'"ccc"', b'"\xff\xff\xff"')


def break_object(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    in_place(path, lines[2], b'"' + b"x" * (len(lines[2]) - 3) + b'"\n')


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (vanish, r"cannot be read \(No such file"),
    (cut, r"has \d+ (bytes and had \d+|records in \d+ bytes)"),
    (cut_to_the_first_line, r"has \d+ (bytes and had \d+|records in \d+ bytes)"),
    (grow, r"has \d+ (bytes and had \d+|records in \d+ bytes)"),
    (replaced_by_longer, r"has \d+ (bytes and had \d+|records in \d+ bytes)"),
    (break_json, "not JSON in UTF-8"),
    (break_type, "`content` must be a string and is int"),
    (break_field, "has no field `content`; its fields are: gid, contemt, others"),
    (break_utf8, "not JSON in UTF-8"),
    (break_object, "a record must be a JSON object"),
]


@pytest.mark.parametrize("blocks_before", [False, True])
@pytest.mark.parametrize(("damage", "words"), DAMAGE)
@pytest.mark.parametrize("location", ["{}", "file://{}"])
def test_a_shard_damaged_before_a_block_is_opened_is_reported(
    tmp_path: Path, damage: Callable[[Path], None], words: str, blocks_before: bool, location: str
) -> None:
    info = write_jsonl(tmp_path, "x.jsonl", ["a", "bb", "ccc"])
    reader = reader_of(location.format(tmp_path), info)
    if blocks_before:
        assert texts_of(reader) == ["a", "bb", "ccc"]
    damage(tmp_path / "x.jsonl")
    with pytest.raises(DataError, match=rf"x\.jsonl, record 2: .*{words}"):
        reader.open_block(2, 3).text(0)


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_a_shard_damaged_while_a_block_is_open_is_reported(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    """A deleted file that is still open can be read; the next block reports the deletion."""
    reader = reader_of(tmp_path, write_jsonl(tmp_path, "x.jsonl", ["a", "bb", "ccc"]))
    block = reader.open_block(0, 3)
    assert block.text(1) == "bb"
    damage(tmp_path / "x.jsonl")
    if damage in (vanish, grow, replaced_by_longer):
        assert block.text(2) == "ccc"
        with pytest.raises(DataError, match=rf"x\.jsonl, record 0: .*{words}"):
            reader.open_block(0, 3)
    else:
        with pytest.raises(DataError, match=rf"x\.jsonl, record 2: .*{words}"):
            block.text(2)


def test_a_deleted_shard_that_is_no_longer_open_is_reported(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, write_jsonl(tmp_path, "x.jsonl", ["a", "bb", "ccc"]))
    block = reader.open_block(0, 3)
    (tmp_path / "x.jsonl").unlink()
    OPEN_FILES.forget_all()
    with pytest.raises(DataError, match=r"x\.jsonl, record 1: the shard cannot be read \(No such file"):
        block.text(1)


def test_a_block_in_a_store_is_fetched_with_one_read(flaky: type[FlakyStore], tmp_path: Path) -> None:
    info = write_jsonl(tmp_path, "x.jsonl", ["a", "bb", "ccc", "dddd"])
    put("flaky://c", {"x.jsonl": (tmp_path / "x.jsonl").read_bytes()})
    reader = reader_of("flaky://c", info)
    reader.open_block(0, 1)
    flaky.calls.clear()
    block = reader.open_block(1, 4)
    assert flaky.calls == ["info", "cat_file", "cat_file"]  # check for changes, offsets, lines
    put("flaky://c", {"x.jsonl": b"gone"})
    assert [block.text(number) for number in (2, 0, 1)] == ["dddd", "bb", "ccc"]
    with pytest.raises(DataError, match=r"flaky://c/x\.jsonl, record 1: the shard has 4 bytes and had \d+"):
        reader.open_block(1, 4)


@pytest.mark.parametrize("error", [OSError("connection lost"), RuntimeError("http 503")])
def test_store_errors_are_retried_and_then_reported(flaky: type[FlakyStore], tmp_path: Path, error: Exception) -> None:
    info = write_jsonl(tmp_path, "x.jsonl", ["a", "bb", "ccc"])
    put("flaky://c", {"x.jsonl": (tmp_path / "x.jsonl").read_bytes()})
    flaky.errors[:] = [error] * 4
    reader = reader_of("flaky://c", info)
    assert texts_of(reader) == ["a", "bb", "ccc"]
    flaky.errors[:] = [error] * 4
    assert texts_of(reader) == ["a", "bb", "ccc"]
    flaky.errors[:] = [error] * 5
    with pytest.raises(DataError, match=rf"flaky://c/x\.jsonl, record 1: the shard cannot be read \(.*{error}"):
        reader.open_block(1, 2)


def test_a_shard_that_differs_from_the_manifest_is_refused(tmp_path: Path) -> None:
    info = write_jsonl(tmp_path, "x.jsonl", ["a", "b", "c"])
    write_jsonl(tmp_path, "x.jsonl", ["a", "b"])
    with pytest.raises(
        DataError, match=r"record 2: the shard has 2 records in \d+ bytes and the manifest says 3 in \d+"
    ):
        reader_of(tmp_path, info).read(2)


def test_a_shard_with_only_a_new_modification_time_is_still_read(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, write_jsonl(tmp_path, "x.jsonl", ["a", "bb"]))
    assert texts_of(reader) == ["a", "bb"]
    os.utime(tmp_path / "x.jsonl", ns=(0, 12345))
    assert texts_of(reader) == ["a", "bb"]


@pytest.mark.parametrize("damage", ["gone", "torn"])
def test_an_index_that_is_deleted_or_truncated_while_in_use_is_rebuilt(tmp_path: Path, damage: str) -> None:
    reader = reader_of(tmp_path, write_jsonl(tmp_path, "x.jsonl", ["a", "bb", "ccc"]))
    assert reader.read(0) == "a"
    index = tmp_path / ".x.jsonl.idx"
    whole = index.read_bytes()
    if damage == "gone":
        index.unlink()
        OPEN_FILES.forget_all()
    else:
        os.truncate(index, 40)
    assert texts_of(reader) == ["a", "bb", "ccc"]
    assert index.read_bytes() == whole


def test_several_threads_load_the_index_of_a_shard_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"text {number}" for number in range(500)]
    reader, built = reader_of(tmp_path, write_jsonl(tmp_path, "x.jsonl", texts)), []

    def count(*arguments: object) -> object:
        built.append(1)
        return build(*arguments)  # type: ignore[arg-type]

    build = jsonl_shard.load_or_build_index
    monkeypatch.setattr(jsonl_shard, "load_or_build_index", count)
    found: list[str] = []
    threads = [threading.Thread(target=lambda n=n: found.append(reader.read(n))) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(texts[:16])
    assert len(built) == 1


def test_common_deviations_from_json_are_accepted(tmp_path: Path) -> None:
    """NaN, Infinity, a byte order mark and Windows line ends are not valid in JSON Lines, but common."""
    data = b'\xef\xbb\xbf{"content": "a", "score": NaN}\r\n{"content": "b", "score": Infinity}\r\n'
    info = write_jsonl(tmp_path, "x.jsonl", ["?", "?"])
    (tmp_path / "x.jsonl").write_bytes(data)
    info = type(info)("x.jsonl", "web", 2, len(data), "0" * 64)
    assert texts_of(reader_of(tmp_path, info)) == ["a", "b"]


def test_a_lone_surrogate_is_refused(tmp_path: Path) -> None:
    data = b'{"content": "a\\ud800"}\n'
    (tmp_path / "x.jsonl").write_bytes(data)
    info = type(write_jsonl(tmp_path, "y.jsonl", ["a"]))("x.jsonl", "web", 1, len(data), "0" * 64)
    with pytest.raises(DataError, match=r"x\.jsonl, record 0: `content` contains half a surrogate pair"):
        reader_of(tmp_path, info).read(0)
