"""File writes: the same bytes, the checksum for the manifest, and syncs in windows."""

import random
from pathlib import Path

import pytest

from z2all_ds.checkpoint import disk_file


@pytest.mark.parametrize("size", [0, 1, 1000, disk_file.CHUNK_BYTES, disk_file.CHUNK_BYTES + 1])
def test_a_copy_has_the_same_bytes_and_checksum(size: int, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(random.Random(size).randbytes(size))
    entry = disk_file.write_file(target, disk_file.copy_of(source))
    assert target.read_bytes() == source.read_bytes()
    with disk_file.hashing_threads() as threads:
        assert entry == {"bytes": size, "checksum": disk_file.file_checksum(source, threads)}


def test_a_file_is_synced_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has several full windows and a last one that is not full."""
    synced: list[int] = []
    monkeypatch.setattr(disk_file, "CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(disk_file, "WINDOW_BYTES", 1 << 14)
    monkeypatch.setattr(disk_file.os, "fdatasync", synced.append)
    (tmp_path / "source").write_bytes(random.Random(0).randbytes((1 << 16) + 100))
    disk_file.write_file(tmp_path / "target", disk_file.copy_of(tmp_path / "source"))
    assert len(synced) == 5  # four full windows, and once at the end
    assert (tmp_path / "target").read_bytes() == (tmp_path / "source").read_bytes()
