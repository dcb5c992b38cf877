"""The memory check before the first step: its estimate matches the memory of real steps, and it changes nothing."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ops.comparing import on_gpu
from tests.zero.engines import tiny_engine, train
from z2all_ds.base.config import load_run_config
from z2all_ds.base.config.stages import run_stages
from z2all_ds.base.errors import MachineError
from z2all_ds.train.speed.dry_run import (
    distinct_shapes,
    dry_run,
    first_step_bytes,
    forward_peak_bytes,
    state_bytes,
    step_bytes,
)
from z2all_ds.zero.ds_config import resolve
from z2all_ds.zero.gradient_sinks import GradientSinks

LARGER = [
    "model.vocab_size=8000",
    "model.hidden_size=512",
    "model.intermediate_size=1408",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=8",
    "model.num_hidden_layers=8",
    "train.sequence_length=1024",
]


def said_by(engine: Any, overrides: list[str], stage_overrides: list[str]) -> list[str]:
    run = load_run_config(None, [*overrides, *stage_overrides])
    said: list[str] = []
    dry_run(engine, run, resolve(run, 1, engine.device.type), said.append)
    return said


def test_each_micro_batch_shape_is_checked_once() -> None:
    stages = "stages=[{name: a, steps: 2}, {name: b, steps: 2, sequence_length: 64}, {name: c}]"
    run = load_run_config(None, ["train.sequence_length=32", "train.micro_batch=2", "train.steps=9", stages])
    assert [stage.name for stage in distinct_shapes(run_stages(run))] == ["a", "b"]


def test_nothing_is_logged_on_a_cpu() -> None:
    with tiny_engine("cpu", "deepspeed=zero1") as (engine, (run, _)):
        said: list[str] = []
        dry_run(engine, run, resolve(run, 1, "cpu"), said.append)
        assert said == []
        weights = sum(p.numel() for p in engine.module.parameters())
        assert state_bytes(engine, resolve(run, 1, "cpu")) == 8 * weights


@pytest.mark.parametrize(
    ("json", "ranks", "updated", "copied"),
    [("zero1", 1, 3_000_000, 0), ("zero2", 4, 750_000, 0), ("zero3", 1, 1_000_000, 4), ("zero0", 1, 2_000_000, 0)],
)
def test_temporary_tensors_of_the_step_are_counted(json: str, ranks: int, updated: int, copied: int) -> None:
    """In proportion to the largest tensor that is updated at once: a shard, a sub-group of it, or a weight."""
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in (2_000_000, 1_000_000)]
    module = SimpleNamespace(parameters=lambda: weights)
    optimizer = SimpleNamespace(sub_group_size=1_000_000)
    if json == "zero2":
        optimizer = SimpleNamespace(averaged_gradients={}, gradient_accumulation_dtype=torch.float32)
    engine: Any = SimpleNamespace(module=module, optimizer=optimizer, dp_world_size=ranks)
    for kind, temporary in (("adamw", 0.0), ("adamw_8bit", 8.03125)):
        run = load_run_config(None, [f"deepspeed={json}", f"optimizer.kind={kind}", "train.global_batch=8"])
        resolved = resolve(run, ranks, "cuda", elsewhere=True)
        assert step_bytes(engine, resolved) == int((copied + temporary) * updated)


@pytest.mark.parametrize(("total", "fits"), [(10**9, True), (10**6, False)])
def test_a_step_that_does_not_fit_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, total: int, fits: bool) -> None:
    """Without activations, so a smaller micro-batch is no advice."""
    run = load_run_config(None, ["deepspeed=zero1", "optimizer.kind=adamw_8bit"])
    module = SimpleNamespace(parameters=lambda: [torch.nn.Parameter(torch.zeros(1_000_000))])
    device = SimpleNamespace(type="cuda")
    engine: Any = SimpleNamespace(module=module, optimizer=SimpleNamespace(), dp_world_size=1, device=device)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr("z2all_ds.train.speed.dry_run.forward_peak_bytes", lambda *_: 0)
    said: list[str] = []
    resolved = resolve(run, 1, "cuda", elsewhere=True)
    if fits:
        dry_run(engine, run, resolved, said.append)
        assert "need about" in said[0]
    else:
        with pytest.raises(MachineError, match=r"^the optimizer step \(adamw_8bit\): needs .* Use another optimizer"):
            dry_run(engine, run, resolved, said.append)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("json", ["zero1", "zero2", "zero3", "zero2_offload"])
def test_the_dry_run_changes_neither_losses_nor_random_state(device: str, json: str) -> None:
    losses = []
    for tried in (False, True):
        with tiny_engine(device, f"deepspeed={json}") as (engine, (run, _)):
            torch.manual_seed(7)
            if tried:
                dry_run(engine, run, resolve(run, 1, device), lambda line: None)
            drawn = torch.rand(3, device=device)
            losses.append((drawn.tolist(), train(engine, 5)))
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] == pytest.approx(losses[1][1], rel=1e-3)  # the order of sums on a GPU varies


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("json", ["zero1", "zero1_fp16", "zero2", "zero3", "zero2_offload"])
def test_the_estimate_matches_the_memory_of_real_steps(device: str, json: str) -> None:
    gc.collect()  # frees the engines of other tests
    with tiny_engine(device, *LARGER, f"deepspeed={json}") as (engine, (run, _)):
        GradientSinks(engine)  # as in a run
        resolved = resolve(run, 1, device)
        shape = distinct_shapes(run_stages(run))[0]
        said = forward_peak_bytes(engine, run, shape) + first_step_bytes(engine, resolved)
        ids = torch.randint(0, 8000, (2, 1025), device=device)
        positions = torch.arange(1024, device=device).expand(2, -1)
        for _ in range(2 * resolved.accumulation):
            outputs = engine(input_ids=ids[:, :-1], position_ids=positions, next_tokens=ids[:, 1:])
            engine.backward(outputs.loss)
            engine.step()
        assert torch.cuda.max_memory_allocated() == pytest.approx(said, rel=0.1)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_a_stage_that_does_not_fit_is_refused_before_the_first_step(device: str) -> None:
    shape = ["model.num_hidden_layers=2", "train.micro_batch=2", "train.global_batch=8", "train.steps=9"]
    stages = "stages=[{name: short, steps: 2}, {name: long, sequence_length: 500000000}]"
    room = "model.max_position_embeddings=500000000"
    with tiny_engine(device, "deepspeed=zero1", room) as (engine, (run, _)):
        of_run = [f"model.{key}={value}" for key, value in run.model.model_dump(exclude_defaults=True).items()]
        with pytest.raises(MachineError, match=r"^micro-batches of \d+ x 500000000 tokens \(stage long\)"):
            said_by(engine, [*of_run, *shape, "train.sequence_length=16", "deepspeed=zero1"], [stages])
