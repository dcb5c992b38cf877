"""Loss per domain, exact under packing, accumulation and any world size: sums and counts are divided only at the end.

This is the only message that all ranks exchange in every step, so it also carries stop requests, the cost of the last
step per rank, and counts of skipped records.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed
from torch import Tensor

from z2all_ds.base.world import World
from z2all_ds.ops.cross_entropy import IGNORED_LABEL


class RankCost(NamedTuple):
    """Cost of a step on one rank; the other ranks see it one step later."""

    work_seconds: float
    """Without waiting for other ranks or for data."""
    data_wait_seconds: float
    memory_bytes: float


class ChannelLoss:
    """Adds up token losses by domain on the device; one small all-reduce and one copy to the host per step."""

    def __init__(
        self,
        domain_names: list[str],
        device: torch.device,
        world: World | None = None,
        counts_bad_records: bool = False,
    ) -> None:
        """With a `world`, the costs of the ranks are exchanged too."""
        self.domain_names = domain_names
        self._rank, ranks = (world.rank, world.world_size) if world else (0, 0)
        rows, columns = 3 if counts_bad_records else 2, len(domain_names) + 1
        # fp64: a sum over 10^6 tokens in fp32 would have rounding errors in the fourth digit.
        size = rows * columns + ranks * len(RankCost._fields)
        self._message = torch.zeros(size, dtype=torch.float64, device=device)
        # Row 0: sums, row 1: counts, row 2: bad records. The last column is not a domain: in row 1 it counts the ranks
        # that raised the flag.
        self._totals = self._message[: rows * columns].view(rows, columns)
        self._costs = self._message[rows * columns :].view(ranks, len(RankCost._fields))
        self.flag_was_raised = False
        """Whether any rank raised it before the last `take`."""
        self.tokens: dict[str, int] = {}
        """Counted tokens per domain over all ranks at the last `take`."""
        self.bad_records: dict[str, int] = {}
        """Skipped records per domain over all ranks at the last `take`, if counted."""
        self.rank_costs: list[RankCost] = []
        """Costs that the ranks passed to `say_cost` before the last `take`."""

    def add(self, losses: Tensor, labels: Tensor, domain_ids: Tensor) -> None:
        """Add one micro-batch; all three are [batch, tokens]."""
        counted = (labels != IGNORED_LABEL).flatten()
        domains = domain_ids.flatten()
        self._totals[0].index_add_(0, domains, losses.detach().flatten().to(torch.float64))
        self._totals[1].index_add_(0, domains, counted.to(torch.float64))

    def add_bad_records(self, counts: Mapping[str, int]) -> None:
        """Add the records that this rank has skipped, by domain."""
        for name, count in counts.items():
            self._totals[2, self.domain_names.index(name)] += count

    def raise_flag(self) -> None:
        """Raise a flag that all ranks see after the next `take`."""
        self._totals[1, -1] += 1

    def say_cost(self, cost: RankCost) -> None:
        """Send the cost of this rank's last step; all ranks see it after the next `take`."""
        self._costs[self._rank].copy_(torch.tensor(cost, dtype=torch.float64), non_blocking=True)

    def take(self) -> tuple[float, dict[str, float]]:
        """Return the mean loss over all counted tokens of all ranks since the last call, in total and per domain."""
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(self._message)
        message = self._message.tolist()
        self._message.zero_()
        columns, size, fields = len(self.domain_names) + 1, self._totals.numel(), len(RankCost._fields)
        (*sums, _), (*counts, flags), *rest = (message[i : i + columns] for i in range(0, size, columns))
        self.flag_was_raised = flags > 0
        self.rank_costs = [RankCost(*message[i : i + fields]) for i in range(size, len(message), fields)]
        self.tokens = {name: int(count) for name, count in zip(self.domain_names, counts, strict=True) if count}
        bad_records = rest[0] if rest else []
        self.bad_records = {name: int(n) for name, n in zip(self.domain_names, bad_records, strict=False) if n}
        per_domain = {
            name: total / count for name, total, count in zip(self.domain_names, sums, counts, strict=True) if count
        }
        return sum(sums) / max(1.0, sum(counts)), per_domain


def perplexities(prefix: str, loss: float, per_domain: dict[str, float]) -> dict[str, float]:
    """Return perplexities by the names of metrics.jsonl; domains whose loss is not finite are left out."""
    named = {"perplexity": loss, **{f"perplexity_of_{name}": value for name, value in per_domain.items()}}
    # exp(700) is near the largest float.
    return {prefix + name: math.exp(min(value, 700.0)) for name, value in named.items() if math.isfinite(value)}
