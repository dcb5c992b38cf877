"""Packed samples for one rank.

The way of a document into a batch
----------------------------------
1. The corpus is a set of *domains*, each a row of documents in raw shards or token shards (`documents`). A domain is
   cut into blocks of neighbours, which are shuffled, shuffled again inside, anew each epoch, and repeated without end
   (`order`). Nothing of this is stored.
2. The run has a fixed number of *lanes*. Lane l of L owns every L-th block of every domain, so the lanes share out each
   epoch with no document twice and none left (`lanes`).
3. The k-th global sample comes from lane k % L, and from the domain that the mixture of its stage names for k
   (`mixture`, `stages`). The lane packs its next documents of that domain into it (`packing`).
4. Rank r of W takes the samples k = r, r + W, r + 2W, ... As W must divide L, these are all samples of the lanes
   l = r, r + W, ...; a rank has its lanes to itself, and ranks never need to talk about data. Its loader workers share
   out its lanes in the same way (`loader`).
5. A step with B = micro-batch x accumulation x W takes the next B global samples, whatever the three factors are.

So the k-th global sample depends on corpus, tokenizer, stages, seed and lanes alone. The state is the cursors of every
lane (three integers a domain) and k. A rank saves the cursors of its lanes, `merge_states` puts them together, and any
other world size deals them out again. A batch made ahead carries the cursors that hold after it; they count only when
it is handed out.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from z2all_ds.base.errors import ConfigError
from z2all_ds.data.data_plan import DataPlan
from z2all_ds.data.documents import Documents, Tokenizer
from z2all_ds.data.lanes import Lane
from z2all_ds.data.packing import Cursor, Sample, make_batch
from z2all_ds.data.spec import StreamSpec, check_shape
from z2all_ds.data.state import StreamState, check_world_size


class Produced(NamedTuple):
    """A sample, and the cursor that its lane has after it in its domain."""

    sample: Sample | None
    """None for one that is skipped: its cursor counts, it is not given out."""
    stage: int
    """Number of its stage."""
    lane: int
    domain_index: int
    cursor: Cursor


class PackedStream(IterableDataset[dict[str, torch.Tensor]]):
    """The endless samples of rank `rank` of `world_size`, each a dict of int64 [sequence_length].

    Iterating goes on where the last iteration stopped: a sample counts as consumed when it is handed out.
    """

    def __init__(
        self,
        spec: StreamSpec,
        tokenizer: Tokenizer,
        rank: int = 0,
        world_size: int = 1,
        documents: Documents | None = None,
    ) -> None:
        """`documents` spares opening the corpus again; by default it is opened here."""
        check_shape(spec, rank, world_size)
        self.plan = DataPlan.open(spec, tokenizer, documents)
        self.plan.schedule.check_world_size(world_size)
        self.rank, self.world_size = rank, world_size
        self._consumed_rank = 0  # samples of this rank, skipped ones too
        self._lane_states = self.plan.fresh_lanes(range(rank, spec.num_lanes, world_size))

    @property
    def domain_names(self) -> list[str]:
        """In the order of domain_ids."""
        return self.plan.schedule.domain_names

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if get_worker_info() is not None:
            raise ConfigError("DataLoader(num_workers)", "every worker would give the same samples", "Use BatchLoader.")
        for produced in self.produce():
            if produced is not None:
                self.mark_consumed(produced)
                if produced.sample is not None:
                    yield {name: column[0] for name, column in make_batch([produced.sample]).items()}

    def produce(self, worker: int = 0, num_workers: int = 1) -> Iterator[Produced | None]:
        """Makes samples from the present state on without moving it; `mark_consumed` does, in the same order.

        Worker w of n makes those of the rank's lanes number w, w + n, w + 2n, ... The workers' rows, dealt together in
        turn, are the rank's row. None keeps the turn where a worker has no lane for it.
        """
        schedule, numbers = self.plan.schedule, list(self._lane_states)
        lanes = [Lane(self.plan.sources, number, self._lane_states[number]) for number in numbers[worker::num_workers]]
        turns_a_round = -(-len(numbers) // num_workers)
        begin = self._consumed_rank  # it moves on while samples are made ahead
        first_round = begin // len(numbers)
        turn = 0
        while True:
            round_number, place = divmod(turn, turns_a_round)
            turn += 1
            in_round = place * num_workers + worker  # which of the rank's lanes
            consumed = (first_round + round_number) * len(numbers) + in_round
            if in_round >= len(numbers) or consumed < begin:
                yield None
                continue
            number = consumed * self.world_size + self.rank  # of the global sample
            stage = schedule.stage_of(number)
            sample = lanes[place].next_sample(number, stage)
            given = None if schedule.is_skipped(number) else sample
            cursor = lanes[place].cursor(sample.domain_index)
            yield Produced(given, stage.number, lanes[place].number, sample.domain_index, cursor)

    def mark_consumed(self, produced: Produced) -> None:
        self._lane_states[produced.lane][produced.domain_index] = produced.cursor
        self._consumed_rank += 1

    @property
    def position(self) -> int:
        """Number of the next global sample to come, at a moment when all ranks stand equal."""
        return self._consumed_rank * self.world_size

    def state_dict(self) -> StreamState:
        """This rank's lanes after its last consumed sample. At the end of a step all ranks stand equal."""
        return self.plan.state_at(self.position, self._lane_states)

    def load_state_dict(self, state: StreamState, allow_data_change: bool = False) -> None:
        """Goes on from a merged state, or from this rank's own. On an error nothing has changed."""
        plan, lane_states = self.plan.going_on(state, list(self._lane_states), allow_data_change)
        check_world_size(state["position"], plan.spec.num_lanes, self.world_size)
        plan.schedule.check_world_size(self.world_size)
        self.plan, self._lane_states = plan, lane_states
        self._consumed_rank = state["position"] // self.world_size
