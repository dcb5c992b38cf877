"""Tests of checkpoints on a GPU: after a change of the JSON the state is bit-identical, and losses continue."""

from pathlib import Path
from typing import Any

import pytest

from tests.ops.comparing import on_gpu
from tests.zero.engines import tiny_engine, train
from tests.zero.state.states import assert_same_state
from z2all_ds.checkpoint.layout import open_checkpoint
from z2all_ds.checkpoint.retention import Retention
from z2all_ds.zero.state.save import restore, save_checkpoint

pytestmark = list(on_gpu)

CHANGES = [
    ("zero1", "zero1"),
    ("zero1", "zero3"),
    ("zero3", "zero2"),
    ("zero2", "zero2_offload"),
    ("zero2_offload", "zero3_offload_param"),
    ("zero3_offload_param", "zero1"),
    ("zero1_fp16", "zero1_fp16"),
    ("zero1_fp16", "zero1"),
    ("zero0", "zero1"),
]


def save(engine: Any, folder: Path) -> Path:
    return save_checkpoint(engine, folder, 4, {}, {}, Retention(keep_last=2))


@pytest.mark.parametrize(("name", "other"), CHANGES)
def test_a_run_continues_with_another_json_on_a_gpu(name: str, other: str, tmp_path: Path) -> None:
    with tiny_engine("cuda", f"deepspeed={name}") as (engine, _):
        train(engine, 4)
        saved = save(engine, tmp_path / "first")
        scale = getattr(engine.optimizer, "loss_scaler", None)
        expected = train(engine, 3)
    with tiny_engine("cuda", f"deepspeed={other}", "train.seed=5") as (engine, _):
        restore(engine, open_checkpoint(saved))
        assert_same_state(saved, save(engine, tmp_path / "second"))
        if name == other and scale is not None:
            assert engine.optimizer.loss_scaler.cur_scale == scale.cur_scale
        # 16 bits and sums in no fixed order; a change from fp32 (zero0) to bf16 also rounds the weights.
        assert train(engine, 3) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("kind", ["ds_fused_adam", "adamw"])
def test_fused_adams_resume_from_each_other(kind: str, tmp_path: Path) -> None:
    with tiny_engine("cuda", "deepspeed=zero2", f"optimizer.kind={kind}") as (engine, _):
        train(engine, 4)
        saved = save(engine, tmp_path / "first")
        expected = train(engine, 3)
    other = {"ds_fused_adam": "adamw", "adamw": "ds_fused_adam"}[kind]
    with tiny_engine("cuda", "deepspeed=zero1", f"optimizer.kind={other}") as (engine, _):
        restore(engine, open_checkpoint(saved))
        assert_same_state(saved, save(engine, tmp_path / "second"))
        assert train(engine, 3) == pytest.approx(expected, rel=1e-2)


def test_8_bit_states_resume_if_the_updated_tensors_are_the_same(tmp_path: Path) -> None:
    larger = ("model.hidden_size=256", "model.vocab_size=256", "optimizer.kind=adamw_8bit")
    with tiny_engine("cuda", "deepspeed=zero2", *larger) as (engine, _):
        train(engine, 4)
        saved = save(engine, tmp_path / "first")
        expected = train(engine, 3)
    with tiny_engine("cuda", "deepspeed=zero2", *larger) as (engine, _):
        restore(engine, open_checkpoint(saved))
        assert train(engine, 3) == pytest.approx(expected, rel=1e-2)
    # On one rank, zero3 updates the same tensors.
    with tiny_engine("cuda", "deepspeed=zero3", *larger) as (engine, _):
        restore(engine, open_checkpoint(saved))
        assert train(engine, 3) == pytest.approx(expected, rel=1e-2)
