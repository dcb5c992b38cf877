"""The peer of `z2all bench step`: Hugging Face's Llama with Liger's kernels under DeepSpeed, in a plain loop.

It has the same shape, micro-batch, accumulation, sequence length, DeepSpeed JSON and optimizer (torch's fused AdamW
unless the run config or the JSON says otherwise), attention by SDPA, and random token ids. Without a GPU it runs
without Liger, which has kernels for GPUs only. Each rank runs this module; rank 0 prints one JSON line.

python -m z2all_ds.bench.peers.hf_llama --steps 20 --config z2all_1b deepspeed=zero1
"""

import argparse
import statistics
import sys
import time
from importlib.metadata import version
from typing import Any

import deepspeed
import torch
from transformers import AutoModelForCausalLM

from z2all_ds.base.config import RunConfig
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.world import World
from z2all_ds.bench.in_ranks import rank_main
from z2all_ds.bench.shared import require_at_least
from z2all_ds.checkpoint.rng import seed_everything
from z2all_ds.model import Z2allConfig
from z2all_ds.train.meters.step_cost import peak_memory_bytes
from z2all_ds.zero import engine as ds
from z2all_ds.zero.ds_config import resolve
from z2all_ds.zero.optimizers import build_optimizer

BATCHES = 8
"""Number of different random batches."""


def main(arguments: list[str] | None = None) -> int:
    """Measure in one rank; return the exit code."""
    parser = argparse.ArgumentParser(description="Measure Hugging Face's Llama with Liger under DeepSpeed.")
    parser.add_argument("--steps", type=int, default=20, help="steps to run; the second half is measured")
    return rank_main(parser, arguments, lambda run, options, world: measure(run, options.steps, world))


def measure(run: RunConfig, steps: int, world: World) -> dict[str, Any]:
    """Train and return this rank's figures."""
    require_at_least(2, steps=steps)  # the second half is measured
    device = ds.pick_device(world)
    resolved = resolve(run, world.world_size, device.type)
    ds.start_process_group(world, device)
    seed_everything(run.train.seed)
    if device.type == "cuda":
        use_liger()
    engine = build(run, resolved)
    size = (BATCHES, run.train.micro_batch, run.train.sequence_length)
    batches = torch.randint(run.model.vocab_size, size, device=device)
    seconds, last_loss = [], 0.0
    for step in range(steps):
        started = time.perf_counter()
        for micro_step in range(resolved.accumulation):
            ids_BT = batches[(step * resolved.accumulation + micro_step) % BATCHES]
            # Without use_cache=False it keeps every layer's keys and values, which training does not need.
            loss = engine(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
            engine.backward(loss)
            engine.step()
        last_loss = loss.item()  # waits for the device once per step, as ours does
        seconds.append(time.perf_counter() - started)
    seconds_per_step = statistics.median(seconds[steps // 2 :])
    libraries = ["torch", "transformers", "deepspeed", *(["liger-kernel"] if device.type == "cuda" else [])]
    model = f"Hugging Face Llama{' + Liger' if device.type == 'cuda' else ''}"
    figures = {
        "name": f"{model}, SDPA, DeepSpeed {resolved.name} {resolved.dtype}",
        "seconds_per_step": seconds_per_step,
        "tokens_per_second": run.train.global_batch * run.train.sequence_length / seconds_per_step,
        "peak_memory_bytes": peak_memory_bytes(device),
        "steps": steps,
        # Under ZeRO-3 a parameter that is not gathered is empty; DeepSpeed keeps its size as `ds_numel`.
        "parameters": sum(getattr(one, "ds_numel", one.numel()) for one in engine.module.parameters()),
        "last_loss": last_loss,
        "packages": {name: version(name) for name in libraries},
    }
    torch.distributed.destroy_process_group()
    return figures


def use_liger() -> None:
    """Replace kernels of transformers' Llama by Liger's, in this whole process."""
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except ImportError as error:
        raise ConfigError("liger-kernel", f"cannot be imported ({error})", "pip install 'z2all_ds[gpu]'") from None
    apply_liger_kernel_to_llama()


def llama_config(run: RunConfig) -> Any:
    """Return transformers' config of the same shape."""
    return Z2allConfig.from_section(run.model).to_llama()


def build(run: RunConfig, resolved: Any) -> Any:
    """Return DeepSpeed's engine of transformers' model."""
    model = AutoModelForCausalLM.from_config(llama_config(run), attn_implementation="sdpa")
    if run.train.activation_checkpointing != "none":
        model.gradient_checkpointing_enable()  # whole layers only
    model.train()
    groups = ds.parameter_groups(model, run.optimizer.weight_decay)
    optimizer = build_optimizer(resolved.optimizer, groups, run.optimizer)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=resolved.config)
    return engine


if __name__ == "__main__":
    sys.exit(main())
