"""Cross-entropy per token, so that a loss per domain costs nothing more.

Contract: `cross_entropy(logits, labels)` with logits [..., vocabulary] and labels [...], -100 where a position does
not count; returns losses [...] in fp32, 0 where a position does not count.
"""

import torch
from torch import Tensor
from torch.nn import functional

from z2all_ds.ops.registry import backend

IGNORED_LABEL = -100


@backend("cross_entropy", "torch")
def reference(logits: Tensor, labels: Tensor) -> Tensor:
    """The reference: the full logits in fp32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    losses = functional.cross_entropy(wide, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
    return losses.view(labels.shape)
