"""The only door to DeepSpeed while training: process groups, optimizer, `deepspeed.initialize`."""

import importlib
import os
import platform
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import numpy
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
    """This rank's GPU, or the CPU; with a GPU visible, DS_ACCELERATOR=cpu still means the CPU."""
    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        if world.local_rank >= torch.cuda.device_count():
            raise MachineError(
                f"rank {world.local_rank} on this node",
                f"only {torch.cuda.device_count()} GPUs here",
                "Start fewer ranks per node.",
            )
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
        # A stream of our own for all that follows: the default one cannot be captured into a CUDA graph, and what
        # DeepSpeed and autograd make while the model is wrapped stays bound to the stream it was made on.
        torch.cuda.set_stream(torch.cuda.Stream(device))
        return device
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """As the vendor calls it; a CPU by its architecture and the threads torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads per rank"


def start_process_group(world: World, device: torch.device) -> None:
    """Joins the other ranks; alone, a group of one on a port the system picks."""
    if world.world_size == 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
        for name in ("RANK", "LOCAL_RANK"):
            os.environ.setdefault(name, "0")
        os.environ.setdefault("WORLD_SIZE", "1")
    join(world, device, default_pg_timeout)
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)  # finds them met
    if device.type == "cpu":
        _unname_shared_buffer(world.rank)


def limit_waiting(seconds: float) -> None:
    """The timeout of all process groups. The one that `initialize` takes does not reach those that ZeRO makes.

    A little later than the node's watchdog, which asks a rank what it is doing before it ends it.
    """
    if seconds <= 0:
        return
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds + WATCHDOG_SECONDS), group)


def _unname_shared_buffer(rank: int) -> None:
    """DeepSpeed's CPU all-reduce maps 66 MiB of /dev/shm per rank and never removes the file.

    Once every rank has mapped all of them the names are of no more use; without one, the memory goes when the ranks
    do, however they end.
    """
    torch.distributed.barrier()
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}"
    (Path("/dev/shm") / name).unlink(missing_ok=True)


def seed_everything(seed: int) -> None:
    """Same initial weights on every rank."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def build_model(
    make: Callable[[], Z2allForCausalLM], run: RunConfig, resolved: ResolvedDeepSpeed, device: torch.device
) -> Z2allForCausalLM:
    """The model with its initial weights, the same under every JSON; under ZeRO-3 no rank ever holds it whole.

    Otherwise its weights are made where and in the dtype in which DeepSpeed wants them: it would move and cast them
    anyway, on the CPU, where for 1.2B weights that takes seconds.
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
    """Wraps the model. The optimizer is ours, so that its settings have one home whatever the JSON."""
    groups = parameter_groups(model, run.optimizer.weight_decay)
    optimizer = build_optimizer(resolved.optimizer, groups, run.optimizer)
    if resolved.stage == 3:
        # A layer's weights are gathered in one go: hooks on each of its modules cost the host more than the layer
        # costs the GPU (H200, 16,384 tokens: 280 ms of hooks and launches a micro-batch, 220 ms of kernels).
        set_z3_leaf_modules(model, [DecoderLayer])
    _load_muon_uncompiled()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=resolved.config)
    if resolved.stage == 0:
        _keep_norm_of_clipping(engine)
    return engine


def _load_muon_uncompiled() -> None:
    """DeepSpeed loads its Muon with every engine and marks parts of it for torch.compile; for that torch loads its
    whole compiler, two seconds of every start. Here they are left unmarked: no optimizer of ours is Muon."""
    marking, compiler.compile = compiler.compile, lambda: compiler.dummy_decorator
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = marking


def _keep_norm_of_clipping(engine: Any) -> None:
    """Without ZeRO DeepSpeed throws away the norm it clips by, and sums it up in fp32 (seen: 2e-6 off on a CPU)."""

    def clip() -> None:
        gradients = [weight.grad for weight in engine.module.parameters() if weight.grad is not None]
        norm = torch.stack([gradient.double().norm() for gradient in gradients]).norm()
        engine._global_grad_norm = norm
        # As ZeRO's optimizers do it.
        torch._foreach_mul_(gradients, (engine.gradient_clipping() / (norm + 1e-6)).clamp(max=1.0).float())

    engine.clip_fp32_gradients = clip


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms and biases (one dimension) do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if _dimensions(p) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if _dimensions(p) < 2], "weight_decay": 0.0},
    ]


def _dimensions(parameter: nn.Parameter) -> int:
    """Built under `zero.Init`, a parameter that is not gathered is empty and has one dimension."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def collectives_of_deepspeed() -> Any:
    """The object whose methods send everything that DeepSpeed sends."""
    return comm.cdb


def set_learning_rate(engine: Any, lr: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
