"""Checksums of snapshot files: every flipped bit, a missing and a truncated file are detected."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from z2all_ds.checkpoint import disk_file, snapshot_check
from z2all_ds.checkpoint.disk_file import text, write_file
from z2all_ds.checkpoint.snapshot_check import header_sum, state_file_entry, why_files_damaged

PARTS = {8: [-(2**63), 5, -1], 2: [-32768, 7, 1], 4: [2**31 - 1] * 9}
"""Words by their size; the parts of 4 bytes are not aligned to their size."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (disk_file, snapshot_check):
        monkeypatch.setattr(module, "BLOCK_BYTES", 16)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    content = b"".join(np.array(words, f"<i{size}").tobytes() for size, words in PARTS.items())
    (tmp_path / "rank_00000.safetensors").write_bytes(content)
    sums = [(size, len(words), sum(words)) for size, words in PARTS.items()]
    small = write_file(tmp_path / "trainer.json", text('{"step": 3, "tokens": 123456789}'))
    return {"rank_00000.safetensors": state_file_entry(sums), "trainer.json": small}


def test_every_flipped_bit_is_detected(files: dict[str, Any], tmp_path: Path) -> None:
    assert why_files_damaged(tmp_path, files) is None
    for name in files:
        intact = (tmp_path / name).read_bytes()
        for bit in range(8 * len(intact)):
            changed = bytearray(intact)
            changed[bit // 8] ^= 1 << bit % 8
            (tmp_path / name).write_bytes(changed)
            assert why_files_damaged(tmp_path, files) == f"{name} does not match its checksum", bit
        assert why_files_damaged(tmp_path, files, verify_checksums=False) is None
        (tmp_path / name).write_bytes(intact)


def test_truncated_and_missing_files_are_detected(files: dict[str, Any], tmp_path: Path) -> None:
    state = tmp_path / "rank_00000.safetensors"
    intact = state.read_bytes()
    for verify_checksums in (True, False):
        state.write_bytes(intact[:-4])
        expected = f"rank_00000.safetensors has {len(intact) - 4} bytes instead of {len(intact)}"
        assert why_files_damaged(tmp_path, files, verify_checksums) == expected
        state.unlink()
        assert why_files_damaged(tmp_path, files, verify_checksums) == "rank_00000.safetensors is missing"


def test_sums_do_not_overflow(tmp_path: Path) -> None:
    header = np.full(3, 2**63 - 1, "<i8").tobytes()
    (tmp_path / "file").write_bytes(header)
    assert why_files_damaged(tmp_path, {"file": state_file_entry([header_sum(header)])}) is None
