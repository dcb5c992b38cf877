"""Packed samples for one rank.

How a document gets into a batch
--------------------------------
1. The corpus is a set of *domains*, each a sequence of documents in raw shards or token shards (`documents`). A domain
   is divided into blocks of adjacent documents; each epoch shuffles the blocks and the documents inside each block, and
   epochs repeat without end (`order`). The order is computed, not stored.
2. The run has a fixed number of *lanes*. Lane l of L owns every L-th block of every domain, so each document belongs to
   exactly one lane per epoch (`data_plan`).
3. The k-th global sample comes from lane k % L, and from the domain that the mixture of its stage gives for k
   (`mixture`, `stages`). The lane packs its next documents of that domain into the sample (`packing`).
4. Rank r of W takes the samples k = r, r + W, r + 2W, ... As W must divide L, these are all samples of the lanes
   l = r, r + W, ...: no other rank reads these lanes, and ranks need no communication about data. The rank's loader
   workers divide its lanes in the same way (`loader`).
5. A step with B = micro-batch x accumulation x W takes the next B global samples, whatever the three factors are.

So the k-th global sample depends only on corpus, tokenizer, stages, seed and lanes. The state is k and the cursors of
every lane (three integers per domain). A rank saves the cursors of its lanes, `merge_states` joins those of all ranks,
and any other world size can load the result. A batch made ahead carries the cursors after it; they become the state
when the batch is consumed.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from z2all_ds.base.errors import ConfigError
from z2all_ds.data.data_plan import DataPlan, Lane, StreamSpec
from z2all_ds.data.documents import Documents, Tokenizer
from z2all_ds.data.packing import Cursor, Sample, make_batch
from z2all_ds.data.state import StreamState, check_world_size


class Produced(NamedTuple):
    """A sample, and the cursor of its lane and domain after it."""

    sample: Sample | None
    """None for a skipped sample: only its cursor counts."""
    stage: int
    """Number of its stage."""
    lane: int
    domain_index: int
    cursor: Cursor


class PackedStream(IterableDataset[dict[str, torch.Tensor]]):
    """The endless samples of rank `rank` of `world_size`, each a dict of int64 [sequence_length].

    A new iteration continues after the last sample that was returned, which counts as consumed.
    """

    def __init__(
        self,
        spec: StreamSpec,
        tokenizer: Tokenizer,
        rank: int = 0,
        world_size: int = 1,
        documents: Documents | None = None,
    ) -> None:
        """Open the corpus, unless its `documents` are given."""
        spec.check_shape(rank, world_size)
        self.plan = DataPlan.open(spec, tokenizer, documents)
        self.plan.schedule.check_world_size(world_size)
        self.rank, self.world_size = rank, world_size
        self._consumed_rank = 0  # samples of this rank, including skipped ones
        self._lane_states = self.plan.fresh_lanes(range(rank, spec.num_lanes, world_size))

    @property
    def domain_names(self) -> list[str]:
        """Names in the order of domain_ids."""
        return self.plan.schedule.domain_names

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if get_worker_info() is not None:
            rule = "every worker would return the same samples"
            raise ConfigError("DataLoader(num_workers)", rule, "Use BatchLoader.")
        for produced in self.produce():
            if produced is not None:
                self.mark_consumed(produced)
                if produced.sample is not None:
                    yield {name: column[0] for name, column in make_batch([produced.sample]).items()}

    def produce(self, worker: int = 0, num_workers: int = 1) -> Iterator[Produced | None]:
        """Make samples from the current state on, without changing it; `mark_consumed` does that, in the same order.

        Worker w of n makes the samples of the rank's lanes number w, w + n, w + 2n, ... Taking one item of each worker
        in turn gives the rank's samples; None fills the turn of a worker that has no lane for it.
        """
        schedule, numbers = self.plan.schedule, list(self._lane_states)
        lanes = [Lane(self.plan, number, self._lane_states[number]) for number in numbers[worker::num_workers]]
        turns_per_round = -(-len(numbers) // num_workers)
        begin = self._consumed_rank  # it increases while samples are made ahead
        first_round = begin // len(numbers)
        turn = 0
        while True:
            round_number, lane_number = divmod(turn, turns_per_round)
            turn += 1
            in_round = lane_number * num_workers + worker  # index among the rank's lanes
            consumed = (first_round + round_number) * len(numbers) + in_round
            if in_round >= len(numbers) or consumed < begin:
                yield None
                continue
            number = consumed * self.world_size + self.rank  # of the global sample
            stage, lane = schedule.stage_of(number), lanes[lane_number]
            sample = lane.next_sample(number, stage)
            used = None if schedule.is_skipped(number) else sample
            yield Produced(used, stage.number, lane.number, sample.domain_index, lane.cursor(sample.domain_index))

    def mark_consumed(self, produced: Produced) -> None:
        self._lane_states[produced.lane][produced.domain_index] = produced.cursor
        self._consumed_rank += 1

    @property
    def position(self) -> int:
        """Number of the next global sample, valid when all ranks have consumed equally many."""
        return self._consumed_rank * self.world_size

    def state_dict(self) -> StreamState:
        """Return the state of this rank's lanes after its last consumed sample."""
        return self.plan.state_at(self.position, self._lane_states)

    def load_state_dict(self, state: StreamState, allow_data_change: bool = False) -> None:
        """Continue from a merged state, or from this rank's own. An error leaves the stream unchanged."""
        plan, lane_states = self.plan.resumed(state, list(self._lane_states), allow_data_change)
        check_world_size(state["position"], plan.spec.num_lanes, self.world_size)
        plan.schedule.check_world_size(self.world_size)
        self.plan, self._lane_states = plan, lane_states
        self._consumed_rank = state["position"] // self.world_size
