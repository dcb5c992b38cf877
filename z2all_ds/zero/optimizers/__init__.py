"""Optimizers by name (`optimizer.kind`), each with the size of its state and the conditions under which it can run.

`registry.py` lists the kinds without torch, so that an invalid choice is refused before the ranks start; `builders.py`
creates them and imports each library on demand; `adamw_bf16.py`, `lion.py` and `rounding.py` are implementations.
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
