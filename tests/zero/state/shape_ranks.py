"""Script for several ranks: saves and resumes engines of many shapes, one after the other, in one process group.

The file named on the command line holds a JSON list of tasks; rank 0 writes the outcomes to the same folder. A task
trains a tiny model with the JSON `deepspeed`, from its initial weights or from the checkpoint `start`. A state that was
loaded is saved again at once (`again`). The task takes `save_after` steps and saves a checkpoint, with `by_deepspeed`
also in DeepSpeed's own format, and then takes three more steps. Each step has six samples, the same for any number of
ranks.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from z2all_ds.base.config import load_run_config
from z2all_ds.base.config.sections import ModelSection
from z2all_ds.base.world import World
from z2all_ds.checkpoint.layout import open_checkpoint, step_name
from z2all_ds.checkpoint.retention import Retention
from z2all_ds.checkpoint.rng import seed_everything
from z2all_ds.model import Z2allConfig, Z2allForCausalLM
from z2all_ds.zero import engine as ds
from z2all_ds.zero.ds_config import resolve
from z2all_ds.zero.state.save import restore, save_checkpoint

SAMPLES = 6
MODEL = ModelSection(
    vocab_size=53,
    hidden_size=20,
    intermediate_size=26,
    num_hidden_layers=2,
    num_attention_heads=5,
    num_key_value_heads=1,
    max_position_embeddings=16,
)
"""Sizes that are not powers of two, so that partitions are padded, begin and end inside parameters, and some are only
padding."""


def engine_of(task: dict[str, Any], world: World) -> Any:
    settings = [f"train.global_batch={SAMPLES}", "train.micro_batch=1", *task.get("overrides", [])]
    run = load_run_config(None, [f"deepspeed={task['deepspeed']}", *settings])
    # On a CPU `auto` replaces the fp16 of a JSON by fp32, and no setting forces fp16, so it is resolved as for a GPU.
    resolved = resolve(run, world.world_size, task.get("resolved_for", "cpu"))
    config = Z2allConfig.from_section(MODEL, pad_token_id=0)
    seed_everything(7)
    model = ds.build_model(lambda: Z2allForCausalLM(config), run, resolved, torch.device("cpu"))
    return ds.build_engine(model, run, resolved)


def train(engine: Any, world: World, position: int, steps: int) -> list[list[float]]:
    """Train with a decreasing learning rate; return the mean loss over all ranks, the learning rate and the new data
    position of each step."""
    found = []
    for step in range(position // SAMPLES, position // SAMPLES + steps):
        ds.set_learning_rate(engine, 0.01 * (1 - step / 20))
        loss_sum = torch.zeros((), dtype=torch.float64)
        for sample in range(world.rank, SAMPLES, world.world_size):
            generator = torch.Generator().manual_seed(100 * step + sample)
            tokens = torch.randint(MODEL.vocab_size, (1, 13), generator=generator)
            loss = engine(input_ids=tokens[:, :-1], next_tokens=tokens[:, 1:]).loss
            loss_sum += loss.detach().double()
            engine.backward(loss)
            engine.step()
        dist.all_reduce(loss_sum)
        rate = engine.optimizer.param_groups[0]["lr"]
        found.append([loss_sum.item() / SAMPLES, rate, (step + 1) * SAMPLES])
    return found


def save(engine: Any, folder: Path, position: int) -> None:
    save_checkpoint(engine, folder, position // SAMPLES, {}, {"position": position}, Retention(keep_last=2))


def outcome(task: dict[str, Any], world: World, folder: Path) -> dict[str, Any]:
    engine = engine_of(task, world)
    here, position = folder / task["name"], 0
    if "start" in task:
        checkpoint = open_checkpoint(folder / task["start"])
        restore(engine, checkpoint)
        position = checkpoint.data_state["position"]
        save(engine, here / "again", position)
    steps = train(engine, world, position, task.get("save_after", 0))
    if "save_after" in task:
        position += task["save_after"] * SAMPLES
        save(engine, here, position)
    if task.get("by_deepspeed"):
        engine.save_checkpoint(str(here / "by_deepspeed"))
    steps += train(engine, world, position, 3)
    counts = {name: getattr(engine, name) for name in ("global_steps", "global_samples", "skipped_steps")}
    losses, rates, positions = map(list, zip(*steps, strict=True))
    saved = f"{task['name']}/{step_name(position // SAMPLES)}"
    return {"losses": losses, "rates": rates, "positions": positions, "saved": saved, "counts": counts}


if __name__ == "__main__":
    plan = Path(sys.argv[-1])
    os.environ["DS_ACCELERATOR"] = "cpu"
    world = World.from_environment()
    ds.start_process_group(world, torch.device("cpu"))
    found = {task["name"]: outcome(task, world, plan.parent) for task in json.loads(plan.read_text())}
    if world.is_main:
        plan.with_name(f"outcomes_of_{plan.name}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    # A rank once ended with "terminate called without an active exception", the message of C++ for a thread that was
    # not joined. It may have happened while Python or a library cleaned up at exit, so that is skipped here. The cause
    # is not established.
    sys.stderr.flush()
    os._exit(0)
