"""Loads a checkpoint into a running engine of the same shape, bit for bit."""

from typing import Any

import torch
import torch.distributed as dist

from z2all_ds.checkpoint.layout import DEEPSPEED_TAG, Checkpoint
from z2all_ds.checkpoint.rng import set_rng_state
from z2all_ds.errors import CheckpointError

SHAPE_KEYS = ("world_size", "zero_stage", "offload_optimizer", "dtype")


def check_shape(checkpoint: Checkpoint, shape: dict[str, Any]) -> None:
    """DeepSpeed's own files load only where they were made: same ranks, stage, offload and dtype."""
    trainer = checkpoint.trainer
    for key in SHAPE_KEYS:
        if trainer[key] != shape[key]:
            raise CheckpointError(
                f"{checkpoint.path.name} was saved with {key}={trainer[key]}",
                f"this run has {key}={shape[key]}, and a checkpoint continues only at its own shape",
                f"Start with {key}={trainer[key]}, or export the checkpoint and begin a new run.",
            )


def restore(engine: Any, checkpoint: Checkpoint) -> None:
    """Weights, optimizer and random generators. Collective."""
    if getattr(engine.optimizer, "swap_optimizer", False):
        # DeepSpeed copies the files back but neither Adam's step nor the states it had left in memory; seen: 2e-3 of
        # loss off one step later.
        raise CheckpointError(
            checkpoint.path.name,
            "its optimizer states lie on a disk (nvme), and DeepSpeed cannot restore those",
            "Begin a new run (another run_dir), under zero3_offload if it is to be continued.",
        )
    loaded, _ = engine.load_checkpoint(str(checkpoint.path), tag=DEEPSPEED_TAG)
    if loaded is None:
        raise CheckpointError(f"{checkpoint.path}", "DeepSpeed could not load it", "See the rank's log for its reason.")
    _replay_cpu_adam(engine.optimizer, checkpoint.step)
    state = torch.load(checkpoint.path / f"rng_rank_{dist.get_rank():04d}.pt", weights_only=True)
    set_rng_state(state)


def _replay_cpu_adam(optimizer: Any, steps: int) -> None:
    """Brings the powers of beta that DeepSpeed's CPU Adam keeps in C++ to where the unbroken run had them.

    It multiplies them from step to step, but a fresh object computes them by `pow` on its first call: another last bit,
    and the resumed run drifts from the unbroken one (seen: 4e-9 of loss one step later). Nothing of this is in the
    checkpoint, so the steps are taken again on one number that nobody uses: some microseconds each.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    adam = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(adam, DeepSpeedCPUAdam):
        return
    weight, gradient, moment, square = torch.zeros(4, 1).unbind()
    (beta1, beta2), eps = adam.param_groups[0]["betas"], adam.param_groups[0]["eps"]
    for step in range(1, steps + 1):
        adam.ds_opt_adam.adam_update(
            adam.opt_id, step, 0.0, beta1, beta2, eps, 0.0, True, weight, gradient, moment, square
        )
