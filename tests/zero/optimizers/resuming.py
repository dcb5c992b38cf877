"""Script for one rank, or for several ranks of the deepspeed launcher: trains a tiny model with each optimizer.

Halfway a checkpoint is saved; the run continues, and a new engine resumes from the checkpoint. The file named on the
command line holds a JSON list of cases; the outcomes are written to the same folder, one file per rank. All cases share
a process, because starting DeepSpeed takes ten seconds and a case about one.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from z2all_ds.base.config import load_run_config
from z2all_ds.base.config.sections import ModelSection
from z2all_ds.base.errors import Z2allError
from z2all_ds.base.world import World
from z2all_ds.checkpoint.layout import open_checkpoint, step_name
from z2all_ds.checkpoint.retention import Retention
from z2all_ds.checkpoint.rng import seed_everything
from z2all_ds.model import Z2allConfig, Z2allForCausalLM
from z2all_ds.zero import engine as ds
from z2all_ds.zero.ds_config import resolve
from z2all_ds.zero.state.save import restore, save_checkpoint

STEPS, SAVED_AFTER = 8, 4
MODEL = ModelSection(
    vocab_size=101,
    hidden_size=36,
    intermediate_size=50,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=16,
)
"""Sizes that are not powers of two, so that partitions are padded."""


def engine_of(case: dict[str, Any], world: World) -> Any:
    overrides = [f"deepspeed={case['deepspeed']}", "train.global_batch=8", "train.micro_batch=2", *case["overrides"]]
    run = load_run_config(None, [*overrides, f"optimizer.kind={case['kind']}"])
    seed_everything(7)
    model = Z2allForCausalLM(Z2allConfig.from_section(MODEL, pad_token_id=0))
    return ds.build_engine(model, run, resolve(run, world.world_size, "cpu"))


def train(engine: Any, world: World, lr: float, steps: range) -> list[float]:
    """Train on the same tokens in every step, with a decreasing learning rate, and return the losses."""
    losses = []
    for step in steps:
        ds.set_learning_rate(engine, lr * (1 - step / 20))
        for micro_batch in range(engine.gradient_accumulation_steps()):
            generator = torch.Generator().manual_seed(10 * micro_batch + world.rank)
            tokens = torch.randint(MODEL.vocab_size, (2, 13), generator=generator)
            loss = engine(input_ids=tokens[:, :-1], next_tokens=tokens[:, 1:]).loss
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    return losses


def fingerprints(engine: Any) -> list[list[str]]:
    """Return (key, dtype, hash) of every tensor that the optimizer updates or keeps."""
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    found = [
        (key, value)
        for weight, state in base.state.items()
        for key, value in [("weight", weight), *state.items()]
        if isinstance(value, Tensor)
    ]
    return sorted([key, str(value.dtype), _hash(value)] for key, value in found)


def _hash(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def outcome(case: dict[str, Any], world: World, folder: Path) -> dict[str, Any]:
    first = engine_of(case, world)
    losses = train(first, world, case["lr"], range(SAVED_AFTER))
    save_checkpoint(first, folder / case["name"], SAVED_AFTER, {}, {}, Retention(keep_last=2))
    losses += train(first, world, case["lr"], range(SAVED_AFTER, STEPS))
    second = engine_of({**case, "kind": case.get("resume_kind", case["kind"])}, world)
    try:
        restore(second, open_checkpoint(folder / case["name"] / step_name(SAVED_AFTER)))
    except Z2allError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    resumed = train(second, world, case["lr"], range(SAVED_AFTER, STEPS))
    return {"losses": losses, "resumed": resumed, "state": fingerprints(first), "resumed_state": fingerprints(second)}


if __name__ == "__main__":
    plan = Path(sys.argv[-1])
    os.environ["DS_ACCELERATOR"] = "cpu"
    here = World.from_environment()
    ds.start_process_group(here, torch.device("cpu"))
    found = {case["name"]: outcome(case, here, plan.parent) for case in json.loads(plan.read_text())}
    plan.with_name(f"outcomes_{here.rank}.json").write_text(json.dumps(found))
