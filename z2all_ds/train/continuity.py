"""Check that a resumed run continues from the same state: the loss on the same tokens is measured when a checkpoint is
saved and again after it is loaded.

It detects lost, mixed-up or rounded weights, different positions and different ops, but not a changed optimizer state.
"""

from typing import Any

import torch

from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint.fixed_tokens import Probe, fixed_tokens

FP32_TOLERANCE = 1e-6
SIXTEEN_BIT_TOLERANCE = 2e-3
"""If either run computes in 16 bits."""


def measure(engine: Any, tokens: int, dtype: str) -> Probe:
    """Run one forward pass, the same on all ranks, without side effects. Collective."""
    ids = fixed_tokens(engine.module.config.vocab_size, tokens).to(engine.device)
    positions = torch.arange(tokens, device=engine.device)[None]
    engine.eval()
    try:
        with torch.no_grad():
            losses = engine(input_ids=ids[:, :-1], position_ids=positions, next_tokens=ids[:, 1:]).losses
    finally:
        engine.train()
    return Probe(tokens, dtype, losses.double().mean().item())


def require_continuity(saved: Probe, now: Probe, checkpoint: str) -> float:
    """Return the relative difference of the loss; raise if it is too large."""
    allowed = FP32_TOLERANCE if saved.dtype == now.dtype == "fp32" else SIXTEEN_BIT_TOLERANCE
    off = saved.difference(now.loss)
    if off <= allowed:
        return off
    raise CheckpointError(
        f"{checkpoint}: a loss of {now.loss:.7g}",
        f"it was {saved.loss:.7g} on the same tokens when it was saved, and {allowed:.0e} is allowed",
        "Restore the model, ops and stages settings; checkpoint.check_continuity=false skips this check.",
    )
