"""Helpers that train a tiny model in this process, with a DeepSpeed JSON and random tokens."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.machine import default_environment
from z2all_ds.base.world import World
from z2all_ds.model import Z2allConfig, Z2allForCausalLM
from z2all_ds.ops import Ops, Situation, resolve_ops
from z2all_ds.zero import engine as ds
from z2all_ds.zero.ds_config import resolve

TINY_SHAPE = [
    "model.vocab_size=64",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "train.sequence_length=16",
    "train.micro_batch=2",
    "train.global_batch=8",
    "optimizer.lr=0.01",
]


@contextmanager
def tiny_engine(device: str, *overrides: str) -> Iterator[tuple[Any, tuple[RunConfig, Ops]]]:
    """Yield (engine, (run, ops)). The process group stays for the next engine, because DeepSpeed keeps its groups."""
    run = load_run_config(None, [*TINY_SHAPE, *overrides])
    world = World.from_environment()
    place = ds.pick_device(world) if device == "cuda" else torch.device("cpu")
    resolved = resolve(run, 1, device)
    ops = resolve_ops(run.ops.model_dump(), Situation(device, resolved.dtype, run.model.shape.head_dim))
    environment, linear = dict(os.environ), torch.nn.functional.linear
    try:
        os.environ.update(default_environment(ranks=1))  # needed to find DeepSpeed's built ops
        ds.start_process_group(world, place)
        config = Z2allConfig.from_section(run.model)
        model = ds.build_model(lambda: Z2allForCausalLM(config, ops), run, resolved, place)
        model.train()
        yield ds.build_engine(model, run, resolved), (run, ops)
    finally:
        # The variables of the one-rank group must not reach processes that other tests start.
        os.environ.clear()
        os.environ.update(environment)
        torch.nn.functional.linear = linear  # ZeRO-3 replaces it permanently


def train(engine: Any, steps: int, micro_batches: int = 4, documents: bool = False) -> list[float]:
    """Train and return the loss of each step; all steps use the same batches."""
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(0, 64, (2, 17), generator=generator).to(engine.device) for _ in range(micro_batches)]
    borders = torch.tensor([0, 5, 16, 20, 32], dtype=torch.int32, device=engine.device)
    losses = []
    for _ in range(steps):
        total = 0.0
        for ids in batches:
            outputs = engine(
                input_ids=ids[:, :-1],
                position_ids=torch.arange(16, device=engine.device).expand(2, -1),
                next_tokens=ids[:, 1:],
                **({"cu_seqlens": borders} if documents else {}),
            )
            total += outputs.losses.double().mean().item()
            engine.backward(outputs.loss)
            engine.step()
        losses.append(total / micro_batches)
    return losses
