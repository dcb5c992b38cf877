"""Packed samples and batches for one rank: where the parts of the data room meet.

The way of a document into a batch
----------------------------------
1. The corpus is a set of *domains*, each a row of documents in JSON-lines shards (`readers`). The row is shuffled by
   a computed permutation, anew each epoch, and repeated without end (`order`): position 0, 1, 2, ... of a domain.
2. The run has a fixed number of *lanes*. Lane l of L owns the positions l, l + L, l + 2L, ... of every domain, so
   the lanes share out each epoch with no document twice and none left. Whenever a lane has used up a document, it
   takes its next one from the domain that is most behind its share of tokens (`mixture`).
3. A lane lays its documents end to end, an <|endoftext|> after each, and cuts the row into samples (`packing`).
4. The global sequence takes one sample of each lane in turn: the k-th global sample is the (k // L)-th of lane k % L.
5. Rank r of W takes the samples k = r, r + W, r + 2W, ... As W must divide L, these are all samples of the lanes
   l = r, r + W, ...; a rank has its lanes to itself, and ranks never need to talk about data.
6. A step with B = micro-batch x accumulation x W takes the next B global samples, whatever the three factors are.

So the k-th global sample depends on corpus, tokenizer, mixture, seed, lanes and sequence length alone. The state is
the cursor of every lane (a dozen integers) and k. A rank saves the cursors of its lanes, `merge_states` puts them
together, and any other world size deals them out again. A batch made ahead by the prefetch thread carries the cursors
that hold after it; they count only when the batch is handed out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from z2all_ds.console import say
from z2all_ds.data.lanes import Lane, LaneState, Sources, Tokenizer, fresh_lane_state
from z2all_ds.data.mixture import resolve_shares
from z2all_ds.data.packing import SAMPLE_COLUMNS, Sample
from z2all_ds.data.prefetch import Prefetcher
from z2all_ds.data.readers import ShardInfo, open_domains
from z2all_ds.data.state import STATE_VERSION, StreamState, adopt_lanes, check_world_size, divisors
from z2all_ds.errors import ConfigError

Batch = dict[str, torch.Tensor]
"""The columns of packing.SAMPLE_COLUMNS, each int64 [micro_batch_size, sequence_length]."""


@dataclass(frozen=True)
class StreamSpec:
    """What decides the order of the data, beside the corpus and the tokenizer themselves."""

    corpus_dir: str | Path
    """Folder with the shards and their manifest."""
    sequence_length: int
    """Tokens of a sample."""
    seed: int = 0
    """Key of all shuffling."""
    num_lanes: int = 256
    """Fixed for the life of a run; the world size must divide it."""
    weights: dict[str, float] | None = None
    """Share of tokens of each domain, in any unit; domains not named are not read. None: by size."""
    temperature: float = 1.0
    """Without weights, shares are size ** (1 / temperature)."""


class CorpusManifest(Protocol):
    """What the stream needs to know of a manifest."""

    @property
    def shards(self) -> Sequence[ShardInfo]: ...
    @property
    def fingerprint(self) -> str: ...


class Produced(NamedTuple):
    """A sample, and the cursor of its lane after it."""

    sample: Sample
    lane: int
    lane_state: LaneState


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
        manifest: CorpusManifest | None = None,
    ) -> None:
        """`manifest` spares reading it again; by default it comes from the corpus folder."""
        _check_shape(spec, rank, world_size)
        if manifest is None:
            from z2all_ds.corpus.manifest import load_manifest

            manifest = load_manifest(Path(spec.corpus_dir))
        domains = open_domains(Path(spec.corpus_dir), manifest.shards)
        shares = resolve_shares(
            spec.weights, spec.temperature, {name: domain.num_bytes for name, domain in domains.items()}
        )
        self.spec, self.rank, self.world_size = spec, rank, world_size
        self.domain_names = list(shares)
        self.shares = list(shares.values())
        self._corpus_fingerprint = manifest.fingerprint
        self._sources = Sources([domains[name] for name in shares], self.shares, tokenizer, spec.seed, spec.num_lanes)
        self._samples_consumed_rank = 0
        self._lane_states = {lane: fresh_lane_state(len(shares)) for lane in range(rank, spec.num_lanes, world_size)}

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if get_worker_info() is not None:
            raise ConfigError("DataLoader(num_workers)", "every worker would give the same samples", "Use BatchLoader.")
        for produced in self.produce():
            self.mark_consumed(produced.lane, produced.lane_state)
            yield {name: torch.from_numpy(column) for name, column in produced.sample.items()}

    def produce(self) -> Iterator[Produced]:
        """Makes samples from the present state on without moving it; `mark_consumed` does, in the same order."""
        lanes = [(number, Lane(self._sources, number, state)) for number, state in self._lane_states.items()]
        turn = self._samples_consumed_rank  # this rank's j-th sample is global sample j * W + r: its lanes in turn
        while True:
            number, lane = lanes[turn % len(lanes)]
            sample = lane.next_sample(self.spec.sequence_length)
            yield Produced(sample, number, lane.state())
            turn += 1

    def mark_consumed(self, lane: int, lane_state: LaneState) -> None:
        self._lane_states[lane] = lane_state
        self._samples_consumed_rank += 1

    def state_dict(self) -> StreamState:
        """This rank's lanes after its last consumed sample. At the end of a step all ranks stand equal."""
        return {
            "version": STATE_VERSION,
            "samples_consumed_global": self._samples_consumed_rank * self.world_size,
            "num_lanes": self.spec.num_lanes,
            "sequence_length": self.spec.sequence_length,
            "corpus_fingerprint": self._corpus_fingerprint,
            "tokenizer_fingerprint": self._sources.tokenizer.fingerprint,
            "seed": self.spec.seed,
            "domains": list(self.domain_names),
            "weights": list(self.shares),
            "lanes": {str(lane): _copy(state) for lane, state in self._lane_states.items()},
        }

    def load_state_dict(self, state: StreamState, allow_data_change: bool = False) -> None:
        """Goes on from a merged state, or from this rank's own. On an error nothing has changed."""
        lane_states = adopt_lanes(state, self.state_dict(), allow_data_change)
        check_world_size(state["samples_consumed_global"], self.spec.num_lanes, self.world_size)
        self._lane_states = {lane: _copy(lane_state) for lane, lane_state in lane_states.items()}
        self._samples_consumed_rank = state["samples_consumed_global"] // self.world_size


class BatchLoader:
    """Endless micro-batches of a stream, made ahead by a background thread that starts with the first one asked for.

    The state is the stream's: it moves when a batch is handed out. Load a state here rather than into the stream, so
    that batches made ahead of the old one are dropped. Use as a context manager, or `close()` it.
    """

    def __init__(
        self, stream: PackedStream, micro_batch_size: int, pin_memory: bool = False, prefetch_batches: int = 4
    ) -> None:
        for name, value in (("micro_batch_size", micro_batch_size), ("prefetch_batches", prefetch_batches)):
            _check_at_least_one(name, value)
        if pin_memory and not torch.cuda.is_available():
            say("data: pin_memory is on, but there is no CUDA device; batches stay in plain memory")
            pin_memory = False
        self.stream = stream
        self.micro_batch_size = micro_batch_size
        self._pin_memory = pin_memory
        self._prefetch_batches = prefetch_batches
        self._prefetcher: Prefetcher[tuple[Batch, list[tuple[int, LaneState]]]] | None = None

    def __iter__(self) -> "BatchLoader":
        return self

    def __next__(self) -> Batch:
        if self._prefetcher is None:
            batches = _make_batches(self.stream.produce(), self.micro_batch_size, self._pin_memory)
            self._prefetcher = Prefetcher(batches, self._prefetch_batches, _DeviceSetter(self._pin_memory))
        batch, cursors = next(self._prefetcher)
        for lane, lane_state in cursors:
            self.stream.mark_consumed(lane, lane_state)
        return batch

    def state_dict(self) -> StreamState:
        """The state after the last batch handed out, however far the thread is ahead."""
        return self.stream.state_dict()

    def load_state_dict(self, state: StreamState, allow_data_change: bool = False) -> None:
        self.close()
        self.stream.load_state_dict(state, allow_data_change)

    def close(self) -> None:
        """Ends the thread. The next batch asked for starts another, from the last consumed batch on."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _make_batches(
    samples: Iterator[Produced], micro_batch_size: int, pin_memory: bool
) -> Iterator[tuple[Batch, list[tuple[int, LaneState]]]]:
    """Batches with the cursors of the lanes they took from. A plain function: the thread must not hold the loader."""
    while True:
        taken = [next(samples) for _ in range(micro_batch_size)]
        # [micro_batch_size, sequence_length] from micro_batch_size times [sequence_length]
        batch = {name: torch.from_numpy(np.stack([item.sample[name] for item in taken])) for name in SAMPLE_COLUMNS}
        if pin_memory:
            batch = {name: column.pin_memory() for name, column in batch.items()}
        yield batch, [(item.lane, item.lane_state) for item in taken]


class _DeviceSetter:
    """Puts the thread on the rank's GPU: a new thread stands on GPU 0, and pinning would open a context there."""

    def __init__(self, pin_memory: bool) -> None:
        self.device = torch.cuda.current_device() if pin_memory else None

    def __call__(self) -> None:
        if self.device is not None:
            torch.cuda.set_device(self.device)


def _check_shape(spec: StreamSpec, rank: int, world_size: int) -> None:
    for name, value in (
        ("sequence_length", spec.sequence_length), ("num_lanes", spec.num_lanes), ("world_size", world_size)
    ):  # fmt: skip
        _check_at_least_one(name, value)
    if spec.num_lanes % world_size:
        raise ConfigError(
            f"world_size={world_size}",
            f"it must divide num_lanes={spec.num_lanes}",
            f"Allowed world sizes: {', '.join(map(str, divisors(spec.num_lanes)))}.",
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank}", f"ranks go from 0 to {world_size - 1}", "Check RANK and WORLD_SIZE.")


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name}={value}", "it must be at least 1", f"Set {name} to 1 or more.")


def _copy(state: LaneState) -> LaneState:
    current = state["current"]
    return {
        "drawn": list(state["drawn"]),
        "taken": list(state["taken"]),
        "current": None if current is None else list(current),
    }
