"""The ops room: one op, one file, all its backends; each op has a reference in plain torch.

`resolve_ops` turns the names in the run config into functions once, at the start, and says why for each.
"""

from z2all_ds.ops.registry import OpChoice, Ops, Situation, resolve_ops

__all__ = ["OpChoice", "Ops", "Situation", "resolve_ops"]
