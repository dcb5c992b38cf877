"""Checksums of files, which are the same while writing and while reading, in any pieces."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.checkpoint import disk_file
from z2all_ds.checkpoint.disk_file import file_checksum, hashing_threads, write_file

BLOCK = 100


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_file, "BLOCK_BYTES", BLOCK)


def by_definition(content: bytes) -> str:
    blocks = [content[start : start + BLOCK] for start in range(0, len(content), BLOCK)]
    return hashlib.sha256(b"".join(hashlib.sha256(block).digest() for block in blocks)).hexdigest()


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.binary(max_size=350), max_size=6))
def test_checksums_from_writing_and_reading_are_equal(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    path, content = tmp_path_factory.mktemp("checksums") / "file", b"".join(pieces)
    entry = write_file(path, lambda file: [file.write(piece) for piece in pieces])
    assert path.read_bytes() == content
    assert entry == {"bytes": len(content), "checksum": by_definition(content)}
    with hashing_threads() as threads:
        assert file_checksum(path, threads) == entry["checksum"]


def test_the_checksum_depends_on_every_byte_and_on_their_order(tmp_path: Path) -> None:
    path, content = tmp_path / "file", bytes(range(250))
    others = [content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :] for place in range(0, 250, 7)]
    others += [content[BLOCK:] + content[:BLOCK], content[:-1], content + b"\0", b""]
    found = set()
    with hashing_threads() as threads:
        for one in [content, *others]:
            path.write_bytes(one)
            found.add(file_checksum(path, threads))
    assert len(found) == 1 + len(others)
