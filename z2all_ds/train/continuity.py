"""Proof that a run goes on where it stopped, whatever was changed in between: the loss of the same tokens is measured
when a checkpoint is saved and again when it has been read.

Weights that were lost, mixed up or rounded on the way, other positions and other ops show in it; the state of the
optimizer does not. The tokens are random and the same for all time, so no data is needed and none is touched.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from z2all_ds.base.errors import CheckpointError

SEED = 20240229
MOST_TOKENS = 256
"""Few, so that a run whose memory is nearly full has room for it."""
FP32_TOLERANCE = 1e-6
SIXTEEN_BIT_TOLERANCE = 2e-3
"""Where one of the two runs computes in 16 bits."""


@dataclass(frozen=True)
class Probe:
    """A loss, and what it was measured on."""

    tokens: int
    dtype: str
    loss: float

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def measure(engine: Any, tokens: int, dtype: str) -> Probe:
    """One forward pass, the same on all ranks, which leaves no trace. Collective."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(engine.module.config.vocab_size, (1, tokens + 1), generator=generator).to(engine.device)
    positions = torch.arange(tokens, device=engine.device)[None]
    engine.eval()
    try:
        with torch.no_grad():
            losses = engine(input_ids=ids[:, :-1], position_ids=positions, next_tokens=ids[:, 1:]).losses
    finally:
        engine.train()
    return Probe(tokens, dtype, losses.double().mean().item())


def require_continuity(saved: Probe, now: Probe, checkpoint: str) -> float:
    """By how much of itself the loss is another; too much is an error."""
    allowed = FP32_TOLERANCE if saved.dtype == now.dtype == "fp32" else SIXTEEN_BIT_TOLERANCE
    off = abs(now.loss - saved.loss) / abs(saved.loss)
    if math.isfinite(off) and off <= allowed:
        return off
    raise CheckpointError(
        f"{checkpoint}: a loss of {now.loss:.7g}",
        f"it was {saved.loss:.7g} on the same tokens when it was saved, and {allowed:.0e} is allowed",
        "Set model, ops and stages as they were; checkpoint.check_continuity=false goes on all the same.",
    )
