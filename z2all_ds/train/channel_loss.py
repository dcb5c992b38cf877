"""Loss per domain, exact under packing, accumulation and any world size: sums and counts, divided only at the end.

It is the one message that all ranks exchange in every step, so what else they must agree on travels along.
"""

import math

import torch
import torch.distributed
from torch import Tensor

from z2all_ds.ops.cross_entropy import IGNORED_LABEL


class ChannelLoss:
    """Adds up token losses by domain on the device; one small all-reduce a step, one copy to the host."""

    def __init__(self, domain_names: list[str], device: torch.device) -> None:
        self.domain_names = domain_names
        # fp64: a sum over 10^6 tokens in fp32 would round in the fourth digit. Row 0 sums, row 1 counts. The last
        # column is no domain: it counts the ranks that have raised the flag.
        self._totals = torch.zeros(2, len(domain_names) + 1, dtype=torch.float64, device=device)
        self.flag_was_raised = False
        """By any rank, before the last `take`."""

    def add(self, losses: Tensor, labels: Tensor, domain_ids: Tensor) -> None:
        """One micro-batch; all three [batch, tokens]."""
        counted = (labels != IGNORED_LABEL).flatten()
        domains = domain_ids.flatten()
        self._totals[0].index_add_(0, domains, losses.detach().flatten().to(torch.float64))
        self._totals[1].index_add_(0, domains, counted.to(torch.float64))

    def raise_flag(self) -> None:
        """All ranks will see it after the next `take`."""
        self._totals[1, -1] += 1

    def take(self) -> tuple[float, dict[str, float]]:
        """Mean loss over all counted tokens of all ranks since the last call, and per domain that occurred."""
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(self._totals)
        sums, counts = self._totals.tolist()
        self._totals.zero_()
        self.flag_was_raised = counts.pop() > 0
        sums.pop()
        per_domain = {
            name: total / count for name, total, count in zip(self.domain_names, sums, counts, strict=True) if count
        }
        return sum(sums) / max(1.0, sum(counts)), per_domain


def perplexities(prefix: str, loss: float, per_domain: dict[str, float]) -> dict[str, float]:
    """By the names of metrics.jsonl; of domains whose loss is not finite there is none."""
    named = {"perplexity": loss, **{f"perplexity_of_{name}": value for name, value in per_domain.items()}}
    # Beyond exp(700) a float has no room.
    return {prefix + name: math.exp(min(value, 700.0)) for name, value in named.items() if math.isfinite(value)}
