"""Which optimizers can resume from each other's state. Does not load torch."""

from z2all_ds.base.errors import CheckpointError

KIND_KEY = "z2all_kind"
"""Key of every parameter group whose value is the kind of the optimizer."""
ADAMS = frozenset({"adamw", "ds_fused_adam", "ds_cpu_adam", "apex_adam"})
"""They keep the same two moments and step count, so each resumes from the state of another."""


def require_same_states(saved: str, here: str) -> None:
    if saved == here or {saved, here} <= ADAMS:
        return
    raise CheckpointError(
        f"the checkpoint's optimizer is {saved}",
        f"this run uses {here}, which has an incompatible optimizer state",
        f"Set optimizer.kind={saved}, or export the checkpoint and start a new run.",
    )
