"""The interface to DeepSpeed during training: process groups, optimizer, `deepspeed.initialize`."""

import importlib
import os
import platform
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.comm import comm
from deepspeed.constants import default_pg_timeout
from deepspeed.runtime import compiler
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from torch.distributed import distributed_c10d

from z2all_ds.base.config import RunConfig
from z2all_ds.base.errors import MachineError
from z2all_ds.base.world import World
from z2all_ds.model import Z2allForCausalLM
from z2all_ds.model.initialization import initialise_weights, materialise
from z2all_ds.model.modules import DecoderLayer
from z2all_ds.ops.dtypes import TORCH_DTYPES
from z2all_ds.zero.ds_config import ResolvedDeepSpeed
from z2all_ds.zero.optimizers import build_optimizer
from z2all_ds.zero.process_group import join

WATCHDOG_SECONDS = 30.0


def pick_device(world: World) -> torch.device:
    """Return this rank's GPU, or the CPU; DS_ACCELERATOR=cpu selects the CPU even if a GPU is visible."""
    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        if world.local_rank >= torch.cuda.device_count():
            raise MachineError(
                f"rank {world.local_rank} on this node",
                f"this node has only {torch.cuda.device_count()} GPUs",
                "Start fewer ranks per node.",
            )
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
        # A separate stream for everything that follows: the default stream cannot be captured into a CUDA graph, and
        # what DeepSpeed and autograd create while wrapping the model stays bound to the stream of its creation.
        torch.cuda.set_stream(torch.cuda.Stream(device))
        return device
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """Return the vendor's name of the GPU; for a CPU its architecture and the threads torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads per rank"


def start_process_group(world: World, device: torch.device) -> None:
    """Join the other ranks; a single rank forms a group of one on a port chosen by the system."""
    if world.world_size == 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
        for name in ("RANK", "LOCAL_RANK"):
            os.environ.setdefault(name, "0")
        os.environ.setdefault("WORLD_SIZE", "1")
    join(world, device, default_pg_timeout)
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)  # uses the existing group
    if device.type == "cpu":
        _unname_shared_buffer(world.rank)


def limit_waiting(seconds: float) -> None:
    """Set the timeout of all process groups. That of `initialize` does not apply to the groups that ZeRO creates.

    Slightly longer than the watchdog's, which asks a rank what it is doing before it ends it.
    """
    if seconds <= 0:
        return
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds + WATCHDOG_SECONDS), group)


def _unname_shared_buffer(rank: int) -> None:
    """Unlink the 66 MiB per rank in /dev/shm that DeepSpeed's CPU all-reduce maps and never removes.

    Once every rank has mapped all of them, the names are not needed; without a name, the memory is freed when the ranks
    end, however they end.
    """
    torch.distributed.barrier()
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}"
    (Path("/dev/shm") / name).unlink(missing_ok=True)


def build_model(
    make: Callable[[], Z2allForCausalLM], run: RunConfig, resolved: ResolvedDeepSpeed, device: torch.device
) -> Z2allForCausalLM:
    """Return the model with its initial weights, equal under every JSON; under ZeRO-3 no rank holds all of it.

    Otherwise the weights are created on the device and in the dtype that DeepSpeed uses: it would move and cast them
    anyway, on the CPU, which takes seconds for 1.2B weights.
    """
    if resolved.stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=resolved.config):
            model = make()
        initialise_weights(model, run.train.seed, _gathered)
        return model
    with torch.device("meta"):
        model = make()
    materialise(model, device, TORCH_DTYPES[resolved.dtype])
    initialise_weights(model, run.train.seed)
    return model


def _gathered(weight: nn.Parameter) -> Any:
    return deepspeed.zero.GatheredParameters(weight, modifier_rank=0)


def build_engine(model: nn.Module, run: RunConfig, resolved: ResolvedDeepSpeed) -> Any:
    """Wrap the model. The optimizer is created here and not by DeepSpeed, so that its settings do not depend on it."""
    groups = parameter_groups(model, run.optimizer.weight_decay)
    optimizer = build_optimizer(resolved.optimizer, groups, run.optimizer)
    if resolved.stage == 3:
        # The weights of a layer are gathered at once: hooks on each of its modules take the host longer than the layer
        # takes the GPU (H200, 16,384 tokens: 280 ms of hooks and launches per micro-batch, 220 ms of kernels).
        set_z3_leaf_modules(model, [DecoderLayer])
    _load_muon_uncompiled()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=resolved.config)
    if resolved.stage == 0:
        _keep_norm_of_clipping(engine)
    return engine


def _load_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon without its torch.compile decorators. DeepSpeed loads it with every engine, and the
    decorators make torch load its compiler, which takes two seconds per start; Muon is not used here."""
    marking, compiler.compile = compiler.compile, lambda: compiler.dummy_decorator
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = marking


def _keep_norm_of_clipping(engine: Any) -> None:
    """Keep the norm used for clipping: without ZeRO, DeepSpeed discards it and sums in fp32 (2e-6 off on a CPU)."""

    def clip() -> None:
        gradients = [weight.grad for weight in engine.module.parameters() if weight.grad is not None]
        norm = torch.stack([gradient.double().norm() for gradient in gradients]).norm()
        engine._global_grad_norm = norm
        # Same formula as ZeRO's optimizers.
        torch._foreach_mul_(gradients, (engine.gradient_clipping() / (norm + 1e-6)).clamp(max=1.0).float())

    engine.clip_fp32_gradients = clip


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups: matrices with weight decay; norms and biases (one dimension) without."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if _dimensions(p) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if _dimensions(p) < 2], "weight_decay": 0.0},
    ]


def _dimensions(parameter: nn.Parameter) -> int:
    """Return the true number of dimensions; under `zero.Init` a parameter that is not gathered has an empty shape."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def collectives_of_deepspeed() -> Any:
    """Return the object whose methods perform all of DeepSpeed's communication."""
    return comm.cdb


def set_learning_rate(engine: Any, lr: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
