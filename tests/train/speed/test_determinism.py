"""Deterministic training: two equal runs give the same bits."""

import os

import pytest
import torch

from tests.ops.comparing import on_gpu
from tests.zero.engines import tiny_engine, train
from z2all_ds.train.speed import determinism

HEADS_OF_64 = ["model.hidden_size=128", "model.num_attention_heads=2", "model.num_key_value_heads=1"]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("documents", [False, True], ids=["plain", "documents"])
@pytest.mark.parametrize("json", ["zero1", "zero2", "zero3"])
def test_two_equal_runs_have_bitwise_equal_losses(
    monkeypatch: pytest.MonkeyPatch, device: str, json: str, documents: bool
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found = []
    try:
        determinism.enforce(True)
        for _ in range(2):
            with tiny_engine(device, f"deepspeed={json}", *HEADS_OF_64) as (engine, _):
                found.append(train(engine, 30, documents=documents))
    finally:
        determinism.enforce(False)
    assert found[0] == found[1]
    assert found[0][-1] < found[0][0]


def test_determinism_can_be_switched_off_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    determinism.prepare(False)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    try:
        determinism.enforce(True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        determinism.enforce(False)
    assert not torch.are_deterministic_algorithms_enabled()
