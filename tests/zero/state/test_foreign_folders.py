"""Tests of imports of folders as other programs write them with DeepSpeed: stock Llama names, its own FusedAdam, and
damaged files. The files are written here, in DeepSpeed's layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.checkpoints import read_whole, weight_shapes
from tests.helpers.llama_folders import MICRO_SHAPE
from tests.helpers.models import TINY
from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint.state_files import StateReader
from z2all_ds.zero.state.deepspeed_folders import DeepSpeedFolder
from z2all_ds.zero.state.import_deepspeed import import_folder

Weights = dict[str, torch.Tensor]


def stock_weights() -> Weights:
    torch.manual_seed(1)
    return {
        name: weight.detach().clone()
        for name, weight in LlamaForCausalLM(LlamaConfig(**MICRO_SHAPE)).named_parameters()
    }


def model_file(weights: Weights, **more: Any) -> dict[str, Any]:
    counters = {"global_steps": 3, "global_samples": 24, "skipped_steps": 0}
    return {"module": weights, "param_shapes": None, "buffer_names": [], "mp_world_size": 1, **counters, **more}


def write_stage_0(folder: Path, weights: Weights, steps: list[float], **group: Any) -> Path:
    state = {
        number: {"step": step, "exp_avg": weight + 1, "exp_avg_sq": weight + 2}
        for number, (step, weight) in enumerate(zip(steps, weights.values(), strict=True))
    }
    groups = [{"params": list(range(len(weights))), "betas": (0.9, 0.95), **group}]
    folder.mkdir()
    content = model_file(weights, optimizer={"state": state, "param_groups": groups})
    torch.save(content, folder / "mp_rank_00_model_states.pt")
    return folder


def write_stage_1(folder: Path, weights: Weights, ranks: int = 2) -> Path:
    """Write the concatenated parameters, divided into equal partitions with padding at the end."""
    flat = torch.cat([weight.view(-1) for weight in weights.values()])
    size = -(-flat.numel() // ranks)
    padding = size * ranks - flat.numel()
    folder.mkdir()
    shapes = [{name: weight.shape for name, weight in weights.items()}]
    torch.save(model_file(weights, param_shapes=shapes), folder / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        part = flat[rank * size : (rank + 1) * size].clone()
        base = {
            "state": {0: {"step": 3.0, "exp_avg": part + 1, "exp_avg_sq": part + 2}},
            "param_groups": [{"params": [0], "betas": (0.9, 0.95)}],
        }
        optimizer = {
            "zero_stage": 1, "partition_count": [ranks], "base_optimizer_state": base,
            "single_partition_of_fp32_groups": [part], "group_paddings": [padding if rank == ranks - 1 else 0],
        }  # fmt: skip
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, folder / name)
    return folder


def imported(folder: Path, out: Path) -> StateReader:
    return StateReader(import_folder(DeepSpeedFolder(folder), out, weight_shapes(TINY), {}, seed=1))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stock_llama_is_imported_under_our_names(stage: int, tmp_path: Path) -> None:
    weights = stock_weights()
    if stage == 0:
        folder = write_stage_0(tmp_path / "theirs", weights, [3.0] * len(weights))
    else:
        folder = write_stage_1(tmp_path / "theirs", weights)
    reader = imported(folder, tmp_path / "run")
    for layer in range(MICRO_SHAPE["num_hidden_layers"]):
        for fused, parts in (
            ("self_attn.qkv", ("self_attn.q", "self_attn.k", "self_attn.v")),
            ("mlp.gate_up", ("mlp.gate", "mlp.up")),
        ):
            wanted = torch.cat([weights[f"model.layers.{layer}.{part}_proj.weight"] for part in parts])
            name = f"model.layers.{layer}.{fused}_proj.weight"
            assert torch.equal(read_whole(reader, name), wanted)
            assert torch.equal(read_whole(reader, name, "exp_avg_sq"), wanted + 2)
    assert torch.equal(read_whole(reader, "lm_head.weight"), weights["lm_head.weight"])
    assert reader.index["steps_taken"] == [3.0, 3.0]


def test_fused_adam_counts_steps_at_the_last_tensor_of_a_group(tmp_path: Path) -> None:
    weights = stock_weights()
    steps = [0.0] * (len(weights) - 1) + [3.0]
    folder = write_stage_0(tmp_path / "theirs", weights, steps, step=0)
    assert imported(folder, tmp_path / "run").index["steps_taken"] == [3.0, 3.0]
    other = write_stage_0(tmp_path / "other", weights, [1.0, *steps[1:]], step=0)
    with pytest.raises(CheckpointError, match="must be equal"):
        imported(other, tmp_path / "other_run")


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    weights = stock_weights()
    folder = write_stage_1(tmp_path / "theirs", weights)
    file = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank_1_mp_rank_00_optim_states\.pt: cannot be read .*checksum"):
        imported(folder, tmp_path / "run")
    assert not list((tmp_path / "run").glob("step_*"))
