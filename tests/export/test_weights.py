"""Tests for plain reads of weights: exactly the values of the memory-mapped reader, whole or in parts."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoints import checkpoint_of, read_weights, read_whole, write_run
from tests.helpers.models import TINY
from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint.layout import WEIGHT
from z2all_ds.checkpoint.state_files import StateReader, file_name
from z2all_ds.export import weights
from z2all_ds.export.weights import WeightReader

QKV = "model.layers.1.self_attn.qkv_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return checkpoint_of(write_run(tmp_path / "run", TINY, tmp_path, tmp_path))


def test_all_weights_equal_those_of_the_state_reader(checkpoint: Path) -> None:
    mapped, found = StateReader(checkpoint), read_weights(checkpoint)
    assert list(found) == list(mapped.shapes)
    for name, tensor in found.items():
        assert torch.equal(tensor, read_whole(mapped, name)), name


@pytest.mark.parametrize("chunk", [7, 1000, 1 << 22])
@pytest.mark.parametrize(("start", "length"), [(0, 2048), (1, 5), (1020, 9), (2047, 1)])
def test_chunks_add_up_to_the_requested_range(
    chunk: int, start: int, length: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some ranges cross the boundary between the pieces of two ranks, at value 1024."""
    monkeypatch.setattr(weights, "CHUNK_VALUES", chunk)
    pieces = list(WeightReader(checkpoint).chunks(QKV, start, length))
    assert max(map(len, pieces)) <= chunk
    expected = read_whole(StateReader(checkpoint), QKV, WEIGHT).view(-1)[start : start + length]
    assert torch.equal(torch.cat(pieces), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounded_values_are_returned_as_fp32(
    dtype: torch.dtype, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "CHUNK_VALUES", 300)
    found = WeightReader(checkpoint).read_rounded(QKV, dtype)
    assert found.dtype == torch.float32
    assert torch.equal(found, read_whole(StateReader(checkpoint), QKV).to(dtype).float())


def test_the_plain_reader_maps_no_file(checkpoint: Path) -> None:
    """The file appears in /proc/self/maps only after a read by the memory-mapped reader."""
    mapped, plain = StateReader(checkpoint), WeightReader(checkpoint)
    read_whole(plain, QKV)
    assert str(checkpoint) not in Path("/proc/self/maps").read_text()
    read_whole(mapped, QKV)
    assert str(checkpoint) in Path("/proc/self/maps").read_text()


def test_a_truncated_file_is_refused(checkpoint: Path) -> None:
    file = checkpoint / "state" / file_name(1)
    reader = WeightReader(checkpoint)
    os.truncate(file, file.stat().st_size - 4)
    with pytest.raises(CheckpointError, match=rf"{file_name(1)}: is truncated"):
        read_whole(reader, "lm_head.weight")


def test_a_false_length_of_a_header_is_one_line(checkpoint: Path) -> None:
    for file in (checkpoint / "state").glob("*.safetensors"):
        file.write_bytes(b"\xff" * 7 + b"\x7f" + file.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="is not readable"):
        WeightReader(checkpoint).read_rounded(QKV, torch.float32)


@pytest.mark.parametrize(
    "entry",
    [
        *({}, 5, {"dtype": 7, "shape": [4], "data_offsets": [0, 16]}),
        {"dtype": "F32", "shape": ["4"], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [-(10**9), 16]},
    ],
)
def test_a_damaged_entry_of_a_header_is_one_line(entry: Any, checkpoint: Path) -> None:
    for file in (checkpoint / "state").glob("*.safetensors"):
        content = file.read_bytes()
        header = json.loads(content[8 : (end := 8 + int.from_bytes(content[:8], "little"))])
        damaged = json.dumps(dict.fromkeys(header, entry)).encode()
        file.write_bytes(len(damaged).to_bytes(8, "little") + damaged + content[end:])
    with pytest.raises(CheckpointError, match=r"has a wrong entry for|is not readable"):
        WeightReader(checkpoint).read_rounded(QKV, torch.float32)
