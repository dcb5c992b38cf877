"""Shards whose content differs from the manifest are found in the background, and raised where the corpus is read."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.corpus.reading.shard_maker import write_jsonl, write_parquet
from tests.data.test_prefetch import wait_until
from z2all_ds.base.errors import DataError
from z2all_ds.base.storage import open_folder
from z2all_ds.base.storage.local import LocalFolder
from z2all_ds.corpus.manifest import ShardInfo
from z2all_ds.corpus.reading import verification
from z2all_ds.corpus.reading.readers import DomainReader
from z2all_ds.corpus.reading.verification import VERIFIER, ShardVerifier

TEXTS = ["first text", "second text", "third text"]


class CountingFolder(LocalFolder):
    """A folder that counts how often a file is read from its beginning to its end."""

    read_whole = 0

    def chunks(self, name: str, size: int) -> Iterator[bytes]:
        self.read_whole += 1
        return super().chunks(name, size)


@pytest.fixture
def verifier() -> Iterator[ShardVerifier]:
    """Return a verifier of this test only, without files of other tests."""
    made = ShardVerifier()
    yield made
    made.stop()
    if made._claims is not None:
        os.close(made._claims)


def wait_for(verifier: ShardVerifier) -> None:
    wait_until(lambda: verifier._thread is None)


def change(path: Path, old: bytes, new: bytes) -> None:
    """Overwrite a part of the file; its size and its time stay the same."""
    data, found = path.read_bytes(), path.stat()
    assert data.count(old) >= 1 and len(old) == len(new)
    path.write_bytes(data.replace(old, new))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_changed_text_of_the_same_size_is_an_error_at_the_next_opening(
    tmp_path: Path, write: Callable[..., ShardInfo]
) -> None:
    suffix = "jsonl" if write is write_jsonl else "parquet"
    options = {} if write is write_jsonl else {"use_dictionary": False, "compression": "none"}
    shards = [write(tmp_path, f"{name}.{suffix}", TEXTS, **options) for name in ("whole", "changed")]
    reader = DomainReader("web", open_folder(tmp_path), shards, verify=True)
    assert reader.read(4) == "second text"
    wait_for(VERIFIER)
    assert [reader.read(number) for number in range(6)] == TEXTS * 2
    change(tmp_path / f"changed.{suffix}", b"second text", b"Second TEXT")
    unverified = DomainReader("web", open_folder(tmp_path), shards)
    assert unverified.read(4) in ("second text", "Second TEXT")  # unnoticed
    (tmp_path / f"changed.{suffix}").touch()
    reader.open_block(3, 6)
    wait_for(VERIFIER)
    expected = rf"changed\.{suffix}: its SHA-256 differs from the manifest, the content has changed\. Restore the file"
    with pytest.raises(DataError, match=expected):
        reader.open_block(0, 1)  # in another shard of the corpus


def test_a_file_is_verified_once_in_small_parts_and_again_after_an_error_or_a_change(
    tmp_path: Path, verifier: ShardVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "CHUNK_BYTES", 7)
    shard, folder = write_jsonl(tmp_path, "a.jsonl", TEXTS), CountingFolder(str(tmp_path))
    for _ in range(3):
        verifier.opened(folder, shard.path, shard.sha256, "Fix it.")
        wait_for(verifier)
    assert folder.read_whole == 1
    os.utime(tmp_path / "a.jsonl", ns=(0, 0))
    verifier.opened(folder, shard.path, shard.sha256, "Fix it.")
    wait_for(verifier)
    assert folder.read_whole == 2
    change(tmp_path / "a.jsonl", b"third", b"THIRD")
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    for reads in (3, 4):
        verifier.opened(folder, shard.path, shard.sha256, "Fix it.")
        wait_for(verifier)
        assert folder.read_whole == reads
        with pytest.raises(DataError, match=r"a\.jsonl: .* Fix it\."):
            verifier.opened(folder, shard.path, shard.sha256, "Fix it.")


def test_object_stores_missing_files_and_missing_checksums_are_passed_over(
    tmp_path: Path, verifier: ShardVerifier
) -> None:
    folder = CountingFolder(str(tmp_path))
    folder.write_whole("a.jsonl", b"{}\n")
    verifier.opened(folder, "a.jsonl", None, "")
    verifier.opened(folder, "missing.jsonl", "0" * 64, "")
    folder.is_local = False
    verifier.opened(folder, "a.jsonl", "0" * 64, "")
    assert (verifier._thread, verifier._known, folder.read_whole) == (None, set(), 0)


def test_a_file_that_cannot_be_read_is_left_to_the_reader(
    tmp_path: Path, verifier: ShardVerifier, capsys: pytest.CaptureFixture[str]
) -> None:
    class Unreadable(LocalFolder):
        def read_range(self, name: str, begin: int, end: int) -> bytes:
            raise PermissionError("no")

    folder = Unreadable(str(tmp_path))
    folder.write_whole("a.jsonl", b"{}\n")
    for _ in range(2):
        verifier.opened(folder, "a.jsonl", "0" * 64, "")
        wait_for(verifier)
    assert capsys.readouterr() == ("", "")


def test_processes_divide_the_files_and_take_over_from_those_that_end(tmp_path: Path, verifier: ShardVerifier) -> None:
    shard, folder = write_jsonl(tmp_path, "a.jsonl", TEXTS), CountingFolder(str(tmp_path))
    (done, tell_done), (go_on, tell_go_on) = os.pipe(), os.pipe()
    other = os.fork()
    if other == 0:  # a process that has verified the file, and lives on until it is told to end
        VERIFIER.opened(folder, shard.path, shard.sha256, "")
        wait_for(VERIFIER)
        os.write(tell_done, b"%d" % folder.read_whole)
        os.read(go_on, 1)
        os._exit(0)
    assert os.read(done, 1) == b"1"
    verifier.opened(folder, shard.path, shard.sha256, "")
    wait_for(verifier)
    assert folder.read_whole == 0
    os.write(tell_go_on, b"x")
    os.waitpid(other, 0)
    verifier.opened(folder, shard.path, shard.sha256, "")
    wait_for(verifier)
    assert folder.read_whole == 1
