"""State files: any safetensors reader can open them, and every part of every tensor can be read back."""

import itertools
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.helpers.checkpoints import read_whole
from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint import state_files
from z2all_ds.checkpoint.disk_file import write_file
from z2all_ds.checkpoint.state_files import Entry, StateReader, build_index, file_name, write_tensors

SHAPES = {"layers.0.weight": [7, 5], "norm": [11]}
CUTS = {"layers.0.weight": [0, 12, 13, 35], "norm": [0, 11]}
"""Boundaries of the pieces, which are assigned to two ranks alternately."""


def whole(name: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(SHAPES[name]).numel()).to(dtype).view(SHAPES[name])


def write(folder: Path, dtype: torch.dtype = torch.float32, leave_out: int | None = None) -> StateReader:
    state = folder / "state"
    state.mkdir()
    entries: list[list[Entry]] = [[], []]
    for name, cuts in CUTS.items():
        for number, (start, end) in enumerate(itertools.pairwise(cuts)):
            if start != leave_out:
                entries[number % 2].append(Entry("weight", name, start, end - start, dtype))
    for rank, of_rank in enumerate(entries):
        values = (whole(one.parameter, dtype).view(-1)[one.start : one.start + one.length] for one in of_rank)
        written = write_file(state / file_name(rank), partial(write_tensors, of_rank, values))
        assert written["bytes"] == (state / file_name(rank)).stat().st_size
    (state / "index.json").write_text(build_index(entries, SHAPES, {}))
    return StateReader(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int16])
def test_whole_parameters_are_read_back(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_files, "CHUNK_BYTES", 16)
    reader = write(tmp_path, dtype)
    for name in SHAPES:
        found = read_whole(reader, name)
        assert found.dtype == dtype and torch.equal(found, whole(name, dtype))
    plain = load_file(tmp_path / "state" / file_name(1))
    assert torch.equal(plain["weight:layers.0.weight:12"], whole("layers.0.weight", dtype).view(-1)[12:13])


@settings(max_examples=100, deadline=None)
@given(start=st.integers(0, 34), length=st.integers(1, 35))
def test_any_part_of_a_parameter_is_read(tmp_path_factory: pytest.TempPathFactory, start: int, length: int) -> None:
    reader = write(tmp_path_factory.mktemp("parts"))
    length = min(length, 35 - start)
    target = torch.zeros(length, dtype=torch.float64)
    reader.read_into(target, "weight", "layers.0.weight", start)
    assert target.tolist() == list(range(start + 1, start + length + 1))


@pytest.mark.parametrize("gap", [0, 12, 13])
def test_a_missing_part_of_a_parameter_is_named_in_the_error(gap: int, tmp_path: Path) -> None:
    reader = write(tmp_path, leave_out=gap)
    with pytest.raises(CheckpointError, match=rf"has no weight of layers.0.weight from element {gap} on"):
        reader.read_into(torch.zeros(35), "weight", "layers.0.weight", 0)
    with pytest.raises(CheckpointError, match="has no exp_avg of norm from element 3 on"):
        reader.read_into(torch.zeros(2), "exp_avg", "norm", 3)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has DeepSpeed's own files"):
        StateReader(tmp_path)
    write(tmp_path)
    index = json.loads((tmp_path / "state" / "index.json").read_text())
    (tmp_path / "state" / "index.json").write_text(json.dumps({**index, "format": 2}))
    with pytest.raises(CheckpointError, match=r"has format 2, supported is 1\. Update z2all_ds\."):
        StateReader(tmp_path)
