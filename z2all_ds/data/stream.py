"""Packed samples for one rank.

How a document gets into a batch
--------------------------------
1. The corpus is a set of *domains*, each a sequence of documents in raw shards or token shards (`documents`). A domain
   is divided into blocks of adjacent documents; each epoch shuffles the blocks and the documents inside each block, and
   epochs repeat without end (`order`). The order is computed, not stored.
2. The run has a fixed number of *lanes*. Each epoch of a domain is divided into as many parts of equal size, so each
   document belongs to exactly one lane per epoch (`order`, `data_plan`).
3. The k-th global sample comes from lane k % L, and from the domain that the mixture of its stage gives for k
   (`mixture`, `stages`). The lane packs its next documents of that domain into the sample (`packing`).
4. Rank r of W takes the samples k = b + r, b + r + W, b + r + 2W, ..., where b is the sample at which the run started
   or was continued. If W divides L, these are all samples of the lanes b + r, b + r + W, ... (modulo L): no other rank
   reads these lanes. Any other W up to L works too: the rank then makes the samples that other ranks take from its
   lanes as well and drops them, which multiplies the work by W / gcd(W, L). Ranks need no communication about data in
   either case. The rank's loader workers divide its lanes in the same way (`loader`).
5. A step with B = micro-batch x accumulation x W takes the next B global samples, whatever the three factors are.

So the k-th global sample depends only on corpus, tokenizer, stages, seed and lanes. The state is k and the cursors of
every lane (three integers per domain). A rank saves the cursors of the lanes whose last sample it took, `merge_states`
joins those of all ranks, and any other world size can load the result. A batch made ahead carries the cursors after it;
they become the state when the batch is consumed.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from z2all_ds.base.errors import ConfigError
from z2all_ds.corpus.reading.skipping import BAD_READS
from z2all_ds.data.data_plan import DataPlan, Lane, StreamSpec
from z2all_ds.data.documents import Documents, Tokenizer
from z2all_ds.data.packing import LaneState, Sample, make_batch
from z2all_ds.data.state import StreamState


class Produced(NamedTuple):
    """A sample, and the cursors of its lane after it."""

    sample: Sample | None
    """None for a skipped sample: only the cursors count."""
    stage: int
    """Number of its stage."""
    number: int
    """Of the global sample."""
    lane: int
    cursors: LaneState
    bad_records: int = 0
    """Records without a valid text that were read for it, as empty documents."""


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
        will_resume: bool = False,
    ) -> None:
        """Open the corpus, unless its `documents` are given.

        `will_resume`: a state will be loaded, so that the ranks share out the samples from there on, not from 0.
        """
        spec.check_shape(rank, world_size)
        self.plan = DataPlan.open(spec, tokenizer, documents)
        if not will_resume:
            self.plan.schedule.check_world_size(world_size)
        self.rank, self.world_size = rank, world_size
        self._begin = 0  # first global sample of this stream
        self._consumed_rank = 0  # samples of this rank since then, including skipped ones
        self._lane_states = self.plan.fresh_lanes(self._lanes_from(0))
        self._next_of_lane = self._first_samples(0)
        self._bad_records: Counter[str] = Counter()

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

    def _lanes_from(self, begin: int) -> list[int]:
        """Return the lanes of this rank's samples from global sample `begin` on, each once, in their order."""
        count = self.plan.spec.num_lanes // math.gcd(self.plan.spec.num_lanes, self.world_size)
        return [(begin + self.rank + turn * self.world_size) % self.plan.spec.num_lanes for turn in range(count)]

    def _first_samples(self, begin: int) -> dict[int, int]:
        """Return the first global sample from `begin` on of each of the rank's lanes."""
        return {lane: begin + (lane - begin) % self.plan.spec.num_lanes for lane in self._lane_states}

    def produce(self, worker: int = 0, num_workers: int = 1) -> Iterator[Produced | None]:
        """Make samples from the current state on, without changing it; `mark_consumed` does that, in the same order.

        Worker w of n makes the samples of the rank's lanes number w, w + n, w + 2n, ... Taking one item of each worker
        in turn gives the rank's samples; None fills the turn of a worker that has no lane for it.
        """
        self.plan.prepare()  # it may read records, which are not those of a sample
        schedule, numbers = self.plan.schedule, list(self._lane_states)
        lanes = [Lane(self.plan, number, self._lane_states[number]) for number in numbers[worker::num_workers]]
        next_of_lane = dict(self._next_of_lane)
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
            number = self._begin + consumed * self.world_size + self.rank  # of the global sample
            stage, lane = schedule.stage_of(number), lanes[lane_number]
            for taken in range(next_of_lane[lane.number], number, self.plan.spec.num_lanes):  # by other ranks
                lane.next_sample(taken, schedule.stage_of(taken))
            next_of_lane[lane.number] = number + self.plan.spec.num_lanes
            bad_before = BAD_READS.count
            sample = lane.next_sample(number, stage)
            used = None if schedule.is_skipped(number) else sample
            bad_records = BAD_READS.count - bad_before
            yield Produced(used, stage.number, number, lane.number, lane.cursors(), bad_records)

    def mark_consumed(self, produced: Produced) -> None:
        self._lane_states[produced.lane] = produced.cursors
        self._next_of_lane[produced.lane] = produced.number + self.plan.spec.num_lanes
        self._consumed_rank += 1
        if produced.bad_records:
            domain = self.plan.schedule.stages[produced.stage].mixture.domain_of(produced.number)
            self._bad_records[self.domain_names[domain]] += produced.bad_records

    def take_bad_records(self) -> Counter[str]:
        """Return how many records were skipped in the samples consumed since the last call, by domain."""
        taken, self._bad_records = self._bad_records, Counter()
        return taken

    @property
    def position(self) -> int:
        """Number of the next global sample, valid when all ranks have consumed equally many."""
        return self._begin + self._consumed_rank * self.world_size

    def epochs_read(self) -> dict[str, float]:
        """Return for each domain how often the lanes of this rank have read their share of it, on average."""
        return {name: sum(lanes) / len(lanes) for name, lanes in self.plan.epochs_read(self._lane_states).items()}

    def state_dict(self) -> StreamState:
        """Return the state after the last consumed sample, of the lanes whose last sample is of this rank."""
        num_lanes, end = self.plan.spec.num_lanes, self.position
        last_samples = range(end - num_lanes + (self._begin + self.rank - end + num_lanes) % self.world_size, end)
        lanes = sorted(number % num_lanes for number in last_samples[:: self.world_size])
        return self.plan.state_at(end, {lane: self._lane_states[lane] for lane in lanes})

    def load_state_dict(self, state: StreamState, allow_data_change: bool = False) -> None:
        """Continue from a merged state, or from this rank's own. An error leaves the stream unchanged."""
        begin = state.get("position", 0)
        plan, lane_states = self.plan.resumed(state, self._lanes_from(begin), allow_data_change)
        plan.schedule.check_world_size(self.world_size, begin)
        self.plan, self._lane_states = plan, lane_states
        self._begin, self._consumed_rank, self._next_of_lane = begin, 0, self._first_samples(begin)
