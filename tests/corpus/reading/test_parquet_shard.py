"""Tests of reading blocks of Parquet: row groups, column types, the cache, and errors when the file changes."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.corpus.reading.shard_maker import reader_of, texts_of, write_parquet
from tests.helpers.parquet_footers import with_false_size
from tests.helpers.stores import FlakyStore, flaky_store, put
from z2all_ds.base.errors import DataError
from z2all_ds.base.storage import folders
from z2all_ds.corpus import shard_check
from z2all_ds.corpus.forms import ReadLimits, parquet_expansion
from z2all_ds.corpus.reading import parquet_shard
from z2all_ds.corpus.reading.parquet_shard import BoundedCache

TEXTS = [f"第{number}篇 " + "words " * (number % 7) for number in range(100)]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> BoundedCache:
    cache = BoundedCache(parquet_shard.CACHE_BYTES)
    monkeypatch.setattr(parquet_shard, "_CACHE", cache)
    return cache


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FlakyStore]]:
    monkeypatch.setattr(folders, "FIRST_WAIT_SECONDS", 0.001)
    with flaky_store() as store:
        yield store


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
@pytest.mark.parametrize("group", [1, 7, 30, 1000])
@pytest.mark.parametrize("is_large", [False, True])
def test_all_column_types_and_row_group_sizes_are_read(
    tmp_path: Path, kind: Any, group: int, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        monkeypatch.setattr(parquet_shard, "LARGE_GROUP_BYTES", 0)
    info = write_parquet(tmp_path, "x.parquet", TEXTS, kind=kind, row_group_size=group, data_page_size=100)
    reader = reader_of(tmp_path, info)
    for block_documents in (1, 13, 100):
        assert texts_of(reader, block_documents) == TEXTS
    assert reader.document_sizes().tolist() == [len(text.encode()) for text in TEXTS]


def test_string_view_columns_are_read(tmp_path: Path) -> None:
    info = write_parquet(tmp_path, "x.parquet", TEXTS, kind=pa.string_view(), row_group_size=30)
    assert texts_of(reader_of(tmp_path, info)) == TEXTS


@pytest.mark.parametrize("is_large", [False, True])
def test_a_null_is_reported_with_its_row(tmp_path: Path, is_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_large:
        monkeypatch.setattr(parquet_shard, "LARGE_GROUP_BYTES", 0)
    info = write_parquet(tmp_path, "x.parquet", ["a", "b", None, "d"], row_group_size=2)
    block = reader_of(tmp_path, info).open_block(1, 4)
    assert (block.text(0), block.text(2)) == ("b", "d")
    with pytest.raises(DataError, match=r"x\.parquet, record 2: `content` must be a text and is null"):
        block.text(1)


def test_a_text_column_that_contains_no_strings_is_refused(tmp_path: Path) -> None:
    info = write_parquet(tmp_path, "x.parquet", ["1", "2"], kind=pa.int64())
    with pytest.raises(DataError, match=r"x\.parquet, record 1: the column `content` must contain strings"):
        reader_of(tmp_path, info).read(1)


def test_invalid_utf8_is_reported_with_its_row(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    info = write_parquet(tmp_path, "x.parquet", ["aaaa", "bbbb"], **plain)
    in_place(tmp_path / "x.parquet", b"bbbb", b"\xff\xff\xff\xff")
    with pytest.raises(DataError, match=r"x\.parquet, record 1: `content` is not UTF-8"):
        reader_of(tmp_path, info).read(1)


def test_a_shard_whose_row_count_differs_from_the_manifest_is_refused(tmp_path: Path) -> None:
    info = write_parquet(tmp_path, "x.parquet", ["a", "b", "c"])
    write_parquet(tmp_path, "x.parquet", ["a", "b"])
    with pytest.raises(DataError, match=r"record 0: the shard has 2 records and the manifest says 3"):
        reader_of(tmp_path, info).read(0)


def in_place(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert len(old) == len(new) and old in data
    with open(path, "r+b") as file:
        file.seek(data.index(old))
        file.write(new)


def vanish(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


def scribble(path: Path) -> None:
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(4)
        file.write(np.random.default_rng(0).bytes(size - 4))


@pytest.mark.parametrize("blocks_before", [False, True])
@pytest.mark.parametrize("damage", [vanish, cut, empty, grow, scribble])
@pytest.mark.parametrize("location", ["{}", "file://{}"])
def test_a_shard_damaged_before_a_block_is_opened_is_reported(
    tmp_path: Path, damage: Callable[[Path], None], blocks_before: bool, location: str
) -> None:
    info = write_parquet(tmp_path, "x.parquet", TEXTS, row_group_size=30)
    reader = reader_of(location.format(tmp_path), info)
    if blocks_before:
        assert reader.open_block(50, 70).text(0) == TEXTS[50]
    before = (tmp_path / "x.parquet").stat()
    damage(tmp_path / "x.parquet")
    if damage is scribble:
        os.utime(tmp_path / "x.parquet", ns=(0, before.st_mtime_ns + 10**10))
    with pytest.raises(DataError, match=r"x\.parquet, record 55: ") as caught:
        reader.open_block(55, 60)
    if blocks_before and damage in (cut, empty, grow):
        assert f"bytes and had {before.st_size} when it was opened" in str(caught.value)


def test_a_broken_row_group_is_reported(tmp_path: Path) -> None:
    """If the footer is intact, the other row groups can still be read."""
    info = write_parquet(tmp_path, "x.parquet", TEXTS, row_group_size=30, compression="zstd", use_dictionary=False)
    data = (tmp_path / "x.parquet").read_bytes()
    frames = [place for place in range(len(data)) if data.startswith(b"\x28\xb5\x2f\xfd", place)]
    with open(tmp_path / "x.parquet", "r+b") as file:  # column 2 of 3 in row group 2 of 4
        file.seek(frames[4])
        file.write(b"????????????")
    reader = reader_of(tmp_path, info)
    assert reader.open_block(0, 30).text(29) == TEXTS[29]
    with pytest.raises(DataError, match=r"x\.parquet, record 40: row group 1 of the shard cannot be read"):
        reader.open_block(40, 50)
    assert reader.open_block(60, 100).text(39) == TEXTS[99]


def test_an_open_block_does_not_need_the_file(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, write_parquet(tmp_path, "x.parquet", TEXTS, row_group_size=30))
    block = reader.open_block(20, 80)
    (tmp_path / "x.parquet").unlink()
    assert [block.text(number) for number in range(60)] == TEXTS[20:80]


def test_a_block_keeps_only_its_own_rows_in_memory(tmp_path: Path, own_cache: BoundedCache) -> None:
    texts = [f"{number:010d}" * 100 for number in range(1000)]
    reader = reader_of(tmp_path, write_parquet(tmp_path, "x.parquet", texts))
    before = pa.total_allocated_bytes()
    block = reader.open_block(500, 502)
    with_cache = pa.total_allocated_bytes() - before
    own_cache.reset()
    assert with_cache > 1_000_000
    assert pa.total_allocated_bytes() - before < 20_000
    assert (block.text(0), block.text(1)) == (texts[500], texts[501])


def test_small_files_with_large_texts_need_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: BoundedCache
) -> None:
    """Also if another tool wrote the manifest, so that no adoption has checked the file."""
    long = "x" * 2**18
    dictionary: dict[str, Any] = {"compression": "zstd", "dictionary_pagesize_limit": 10**9}
    many = write_parquet(tmp_path, "many.parquet", [long] * 300, **dictionary)
    few = write_parquet(tmp_path, "few.parquet", [long] * 40, **dictionary)
    pages = write_parquet(tmp_path, "pages.parquet", [f"{n}{long}" for n in range(40)], compression="zstd")
    monkeypatch.setattr(parquet_shard, "LARGE_GROUP_BYTES", 2**22)
    monkeypatch.setattr(parquet_expansion, "BATCH_LIMIT_BYTES", 2**20)
    monkeypatch.setattr(shard_check, "ReadLimits", lambda: ReadLimits(expansion_allowance_bytes=2**26))
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(DataError, match=r"many\.parquet, record 5: expands to 78,643,200 bytes"):
            reader_of(tmp_path, many).read(5)
        assert reader_of(tmp_path, few).read(5) == long  # within the limit, but too large to decode it completely
        monkeypatch.setattr(shard_check, "ReadLimits", lambda: ReadLimits(expansion_allowance_bytes=2**22))
        with pytest.raises(DataError, match=r"few\.parquet, record 0: expands to"):
            reader_of(tmp_path, few).document_sizes()
        data = with_false_size((tmp_path / "pages.parquet").read_bytes(), column=1)
        (tmp_path / "pages.parquet").write_bytes(data)
        with pytest.raises(DataError, match=r"pages\.parquet, record 5: expands to 10,\d+,\d+ bytes"):
            reader_of(tmp_path, pages).read(5)
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() < 2**23


def test_neighbouring_blocks_decode_a_row_group_once(flaky: type[FlakyStore], tmp_path: Path) -> None:
    info = write_parquet(tmp_path, "x.parquet", TEXTS, row_group_size=50)
    put("flaky://c", {"x.parquet": (tmp_path / "x.parquet").read_bytes()})
    reader = reader_of("flaky://c", info)
    reader.open_block(0, 5)
    flaky.calls.clear()
    assert reader.open_block(5, 10).text(0) == TEXTS[5]
    assert flaky.calls == ["info"]
    assert reader.open_block(45, 55).text(9) == TEXTS[54]
    assert flaky.calls == ["info", "info", "cat_file"]  # one read for the text column of the second row group


def test_store_errors_are_retried_and_then_reported(flaky: type[FlakyStore], tmp_path: Path) -> None:
    info = write_parquet(tmp_path, "x.parquet", TEXTS, row_group_size=50)
    put("flaky://c", {"x.parquet": (tmp_path / "x.parquet").read_bytes()})
    flaky.errors[:] = [OSError("connection lost")] * 4
    reader = reader_of("flaky://c", info)
    assert reader.open_block(0, 5).text(0) == TEXTS[0]
    flaky.errors[:] = [OSError("connection lost")] * 9
    with pytest.raises(DataError, match=r"flaky://c/x\.parquet, record 60: the shard cannot be read \(connection lost"):
        reader.open_block(60, 65)


def test_the_cache_stays_within_its_size_limit() -> None:
    cache = BoundedCache(100)
    for number in range(10):
        cache.put(number, f"thing {number}", 30)
        assert cache.get(max(0, number - 1)) is not None
    assert [number for number in range(10) if cache.get(number)] == [7, 8, 9]
    cache.put("too large", "thing", 101)
    assert cache.get("too large") is None
    cache.put(9, "again", 60)
    cache.put(9, "again", 60)
    assert cache.get(9) == "again"
    assert cache._bytes == 60


def test_several_threads_can_read_one_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_shard, "_CACHE", BoundedCache(3000))
    reader = reader_of(tmp_path, write_parquet(tmp_path, "x.parquet", TEXTS, row_group_size=10))
    wrong: list[object] = []

    def read(shift: int) -> None:
        for number in range(60):
            place = (number * 37 + shift * 11) % 95
            block = reader.open_block(place, place + 5)
            if [block.text(n) for n in range(5)] != TEXTS[place : place + 5]:
                wrong.append(place)

    threads = [threading.Thread(target=read, args=(shift,)) for shift in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
