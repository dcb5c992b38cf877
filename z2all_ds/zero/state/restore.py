"""Loads a checkpoint into a running engine: bit for bit at its own shape, to the bit in every value at any other."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from z2all_ds.checkpoint.layout import Checkpoint
from z2all_ds.checkpoint.rng import rng_name, set_rng_state
from z2all_ds.zero.state.engine_state import read_state


def restore(engine: Any, checkpoint: Checkpoint) -> None:
    """Weights, optimizer and random generators. Collective."""
    read_state(engine, checkpoint.path)
    set_rng_state(torch.load(_rng_file(checkpoint.path), weights_only=True))


def _rng_file(checkpoint: Path) -> Path:
    """This rank's own; ranks that have none (more go on than have saved) share those of others."""
    own = checkpoint / rng_name(f"{dist.get_rank():04d}")
    saved = sorted(checkpoint.glob(rng_name("*")))
    return own if own.exists() else saved[dist.get_rank() % len(saved)]
