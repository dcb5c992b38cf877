"""Tests of parts: all documents are written to files that fit into a shard, with one entry each in the side files."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.corpus.building import parts as parts_module
from z2all_ds.corpus.building.parts import PartWriter
from z2all_ds.corpus.cleaning import CleaningRules
from z2all_ds.corpus.cleaning.duplicates import KEY_BYTES, content_key
from z2all_ds.corpus.cleaning.near_duplicates import NUM_PERM, signature
from z2all_ds.corpus.draft import Draft

RULES = CleaningRules(exact_duplicates=True, near_duplicates=0.8)


def writer_in(folder: Path, max_bytes: int) -> PartWriter:
    return PartWriter(lambda number: folder / f"u.{number}.lines", "zh", 5_000, 70, RULES, max_bytes)


@settings(deadline=None)  # fsync may be slow
@given(st.lists(st.text("a文\n", max_size=60), max_size=20), st.sampled_from([1, 200, 10**6]))
def test_every_document_is_written_with_its_length_key_and_signature(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], block_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts_module, "BLOCK_BYTES", block_bytes)
        with writer_in(folder, 600) as writer:
            writer.write(Draft("题", text, others={"n": 10**30}) for text in texts)
            assert writer.documents == len(texts)
            size = writer.bytes
            writer.finish()
    found: list[Any] = []
    signatures: list[Any] = []
    keys = b""
    for part in writer.parts:
        data = Path(part.path).read_bytes()
        lines = data.splitlines(keepends=True)
        assert (part.documents, part.bytes) == (len(lines), len(data))
        assert part.sha256 == hashlib.sha256(data).hexdigest()
        assert part.lengths().tolist() == [len(line) for line in lines]
        assert part.first_id == 70 + len(found)
        found += [json.loads(line) for line in lines]
        keys += part.file(".keys").read_bytes()
        signatures.append(np.fromfile(part.file(".signatures"), np.uint32).reshape(-1, NUM_PERM))
        if block_bytes == 1:  # every block contains one document
            assert part.bytes <= 600
    assert sum(part.bytes for part in writer.parts) == size
    assert [record["content"] for record in found] == texts
    assert [record["gid"] for record in found] == list(range(5_000, 5_000 + len(texts)))
    assert [record["id"] for record in found] == list(range(70, 70 + len(texts)))
    assert len(keys) == KEY_BYTES * len(texts)
    assert keys == b"".join(map(content_key, texts))
    assert np.concatenate(signatures).tolist() == [signature(text).tolist() for text in texts]
    assert not list(folder.glob("*.tmp"))


def test_an_exception_removes_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "BLOCK_BYTES", 1)

    def some_and_an_error() -> object:
        yield from (Draft("", "text" * 50) for _ in range(5))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), writer_in(tmp_path, 600) as writer:
        writer.write(some_and_an_error())  # type: ignore[arg-type]
    assert len(writer.parts) == 2
    assert list(tmp_path.iterdir()) == []
