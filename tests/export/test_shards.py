"""Tests for shards: the layout of Hugging Face and exactly the weights of the checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from tests.helpers.checkpoints import checkpoint_of, read_weights, weight_shapes, write_run
from tests.helpers.models import TINY
from tests.helpers.stock_names import to_stock
from z2all_ds.export.shards import INDEX_NAME, Part, exported_parts, plan_shards, write_shards
from z2all_ds.export.weights import WeightReader
from z2all_ds.model import Z2allConfig

CONFIG = Z2allConfig.from_section(TINY)


def ignore(_amount: float, _note: str = "") -> None:
    """Ignore progress."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    return checkpoint_of(write_run(root / "run", TINY, root, root))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_bytes", [10**9, 60_000, 1])
def test_files_equal_those_of_hugging_face(
    dtype: torch.dtype, max_bytes: int, checkpoint: Path, tmp_path: Path
) -> None:
    ours = read_weights(checkpoint)
    expected = {name: t.to(dtype, copy=True) for name, t in to_stock(ours, CONFIG).items()}
    parts = exported_parts(WeightReader(checkpoint).shapes, CONFIG)
    plan = plan_shards(parts, dtype, max_bytes)
    written: list[float] = []
    write_shards(tmp_path, plan, WeightReader(checkpoint), dtype, lambda amount, note="": written.append(amount))

    theirs = split_torch_state_dict_into_shards(expected, max_shard_size=max_bytes)
    assert {file: [part.name for part in of_file] for file, of_file in plan.items()} == theirs.filename_to_tensors
    found = {}
    for file in theirs.filename_to_tensors:
        found.update(load_file(tmp_path / file))
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == dtype and torch.equal(found[name], tensor), name
    total = sum(tensor.nbytes for tensor in expected.values())
    assert sum(written) == total
    if theirs.is_sharded:
        index = json.loads((tmp_path / INDEX_NAME).read_text())
        assert index["weight_map"] == theirs.tensor_to_filename
        assert index["metadata"]["total_size"] == total == theirs.metadata["total_size"]
    else:
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_tied_head_is_not_written() -> None:
    tied = TINY.model_copy(update={"tie_word_embeddings": True})
    shapes = {**weight_shapes(tied), "lm_head.weight": [1024, 32]}
    parts = exported_parts(shapes, Z2allConfig.from_section(tied))
    assert "lm_head.weight" not in {part.name for part in parts}
    assert sum(part.num_values for part in parts) == sum(torch.Size(s).numel() for s in weight_shapes(tied).values())


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30), most=st.integers(1, 100))
def test_every_tensor_is_in_one_file_and_files_keep_the_size_limit(sizes: list[int], most: int) -> None:
    parts = [Part(f"p{number}", "p", 0, (size,)) for number, size in enumerate(sizes)]
    plan = plan_shards(parts, torch.bfloat16, most)
    placed = [part for of_file in plan.values() for part in of_file]
    assert sorted(placed, key=lambda part: part.name) == sorted(parts, key=lambda part: part.name)
    for of_file in plan.values():
        assert len(of_file) == 1 or sum(2 * part.num_values for part in of_file) <= most
