"""Loss per domain, exact under packing, accumulation and any world size: sums and counts, divided only at the end."""

import torch
import torch.distributed
from torch import Tensor

from z2all_ds.ops.cross_entropy import IGNORED_LABEL


class ChannelLoss:
    """Adds up token losses by domain on the device; one small all-reduce a step, one copy to the host."""

    def __init__(self, domain_names: list[str], device: torch.device) -> None:
        self.domain_names = domain_names
        # fp64: a sum over 10^6 tokens in fp32 would round in the fourth digit. Row 0 sums, row 1 counts.
        self._totals = torch.zeros(2, len(domain_names), dtype=torch.float64, device=device)

    def add(self, losses: Tensor, labels: Tensor, domain_ids: Tensor) -> None:
        """One micro-batch; all three [batch, tokens]."""
        counted = (labels != IGNORED_LABEL).flatten()
        domains = domain_ids.flatten()
        self._totals[0].index_add_(0, domains, losses.detach().flatten().to(torch.float64))
        self._totals[1].index_add_(0, domains, counted.to(torch.float64))

    def take(self) -> tuple[float, dict[str, float]]:
        """Mean loss over all counted tokens of all ranks since the last call, and per domain that occurred."""
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(self._totals)
        sums, counts = self._totals.tolist()
        self._totals.zero_()
        per_domain = {
            name: total / count for name, total, count in zip(self.domain_names, sums, counts, strict=True) if count
        }
        return sum(sums) / max(1.0, sum(counts)), per_domain
