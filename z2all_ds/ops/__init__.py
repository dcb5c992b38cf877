"""The ops of the model: one file per op with all its backends; each op has a reference in plain torch.

`resolve_ops` selects a function for each op once, at startup, and records the reasons.
"""

from z2all_ds.ops.registry import OpChoice, Ops, Situation, resolve_ops

__all__ = ["OpChoice", "Ops", "Situation", "resolve_ops"]
