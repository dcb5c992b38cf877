"""The loss on fixed tokens that a checkpoint stores. Whatever computes with its weights later, a resumed run or an
export, must reach the same loss.

The tokens are random with a fixed seed, so no training data is needed.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.foreign_content import explain_content
from z2all_ds.checkpoint.layout import FIX_DAMAGED, TRAINER, Checkpoint

PROBE = "probe"
"""Its key in the trainer's record of a checkpoint."""
FP8 = "fp8"
"""Precision of a probe whose linear layers multiply in 8 bits, and the beginning of their backends' names."""
SEED = 20240229
MOST_TOKENS = 256
"""Small, so that it fits even if the memory is nearly full."""


@dataclass(frozen=True)
class Probe:
    """A loss, and the conditions it was measured under."""

    tokens: int
    dtype: str
    loss: float

    def as_record(self) -> dict[str, Any]:
        return asdict(self)

    def difference(self, loss: float) -> float:
        """Return the relative difference of another loss on the same tokens; infinite if that is not finite."""
        off = abs(loss - self.loss) / abs(self.loss)
        return off if math.isfinite(off) else math.inf


def fixed_tokens(vocab_size: int, tokens: int) -> Tensor:
    """Return token ids [1, tokens + 1]: the inputs, and shifted by one the tokens to predict."""
    return torch.randint(vocab_size, (1, tokens + 1), generator=torch.Generator().manual_seed(SEED))


def stored_probe(checkpoint: Checkpoint) -> Probe | None:
    """Return the probe of a checkpoint; None if it has none, because it was imported."""
    stored = checkpoint.trainer.get(PROBE)
    if stored is None:
        return None
    with explain_content(CheckpointError, f"checkpoint {checkpoint.path}", f"{TRAINER}: wrong probe", FIX_DAMAGED):
        found = Probe(int(stored["tokens"]), str(stored["dtype"]), float(stored["loss"]))
        if not 0 < found.tokens <= MOST_TOKENS or not found.loss:
            raise ValueError(f"{found}")
        return found
