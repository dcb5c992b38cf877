"""Optimizers by name (`optimizer.kind`), each with its state's bytes and the reasons for which it cannot run.

`registry.py` knows the kinds and loads no torch, so that a bad choice is refused before the ranks start; `builders.py`
makes them, each library imported when its kind is chosen; `adamw_bf16.py`, `lion.py` and `rounding.py` are our own.
"""

from z2all_ds.zero.optimizers.registry import (
    KINDS,
    OptimizerChoice,
    OptimizerKind,
    OptimizerSituation,
    build_optimizer,
    choose_optimizer,
)

__all__ = ["KINDS", "OptimizerChoice", "OptimizerKind", "OptimizerSituation", "build_optimizer", "choose_optimizer"]
