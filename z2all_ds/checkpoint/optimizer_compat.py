"""Whose optimizer state a checkpoint holds. Loads no torch."""

from z2all_ds.base.errors import CheckpointError

KIND_KEY = "z2all_kind"
"""In every parameter group: the kind of its optimizer."""
ADAMS = frozenset({"adamw", "ds_fused_adam", "ds_cpu_adam", "apex_adam"})
"""Keep the same two moments and the number of steps: each goes on from another's."""


def require_same_states(saved: str, here: str) -> None:
    if saved == here or {saved, here} <= ADAMS:
        return
    raise CheckpointError(
        f"the checkpoint's optimizer is {saved}",
        f"this run has {here}, whose state is another",
        "Set optimizer.kind as it was, or export the checkpoint and begin a new run.",
    )
