"""Micro-batches of a stream, prepared by a background thread, and by worker processes if tokenizing needs more cores.

The workers are those of torch's DataLoader, spawned (not forked: a rank has threads and a GPU), each with a part of the
rank's lanes. They send compact samples through pipes rather than shared memory, which is scarce in containers. The
thread interleaves the workers' samples, makes the columns of each batch, and pins them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from z2all_ds.base.console import say
from z2all_ds.base.errors import ConfigError, MachineError, Z2allError
from z2all_ds.base.machine import one_thread_each
from z2all_ds.data.packing import Batch, Sample, make_batch
from z2all_ds.data.prefetch import Prefetcher
from z2all_ds.data.state import StreamState
from z2all_ds.data.stream import PackedStream, Produced

TOKENS_PER_MESSAGE = 8192
MAX_SAMPLES_PER_MESSAGE = 32
"""Limits of one message of a worker. With one short sample per message, sending would cost as much as making it."""


class BatchLoader:
    """Endless micro-batches of a stream, prepared ahead after the first request.

    The state is that of the stream: it changes when a batch is returned. Load a state here rather than into the stream,
    so that batches prepared from the old state are dropped. Use as a context manager, or call `close()`.
    """

    def __init__(
        self,
        stream: PackedStream,
        micro_batch_size: int | Sequence[int],
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_batches: int = 4,
    ) -> None:
        """`micro_batch_size`: one for all stages, or one per stage."""
        stages = stream.plan.schedule.stages
        sizes = [micro_batch_size] * len(stages) if isinstance(micro_batch_size, int) else list(micro_batch_size)
        assert len(sizes) == len(stages), (sizes, len(stages))
        for name, value, least in (
            ("micro_batch_size", min(sizes), 1),
            ("prefetch_batches", prefetch_batches, 1),
            ("num_workers", num_workers, 0),
        ):
            if value < least:
                raise ConfigError(f"{name}={value}", f"it must be at least {least}", f"Set {name} to {least} or more.")
        if pin_memory and not torch.cuda.is_available():
            say("data: pin_memory is on, but there is no CUDA device; batches are not pinned")
            pin_memory = False
        self.stream, self.num_workers = stream, num_workers
        self._micro_batch_sizes, self._pin_memory, self._prefetch_batches = sizes, pin_memory, prefetch_batches
        self._prefetcher: Prefetcher[tuple[Batch, list[Produced]]] | None = None

    def __iter__(self) -> "BatchLoader":
        return self

    def __next__(self) -> Batch:
        if self._prefetcher is None:
            samples = self.stream.produce() if self.num_workers == 0 else _from_workers(self.stream, self.num_workers)
            device = torch.cuda.current_device() if self._pin_memory else None
            batches = make_batches(samples, self._micro_batch_sizes, device)
            self._prefetcher = Prefetcher(batches, self._prefetch_batches)
        batch, consumed = next(self._prefetcher)
        for produced in consumed:
            self.stream.mark_consumed(produced)
        return batch

    def state_dict(self) -> StreamState:
        """Return the state after the last batch returned, however many are prepared ahead."""
        return self.stream.state_dict()

    def load_state_dict(self, state: StreamState, allow_data_change: bool = False) -> None:
        self.close()
        self.stream.load_state_dict(state, allow_data_change)

    def close(self) -> None:
        """End thread and workers. The next request starts new ones, after the last consumed batch."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_batches(
    samples: Iterator[Produced | None], micro_batch_sizes: Sequence[int], pinning_device: int | None = None
) -> Iterator[tuple[Batch, list[Produced]]]:
    """Yield batches, pinned if a device is given, with what `mark_consumed` needs after each.

    Not a method of the loader: the prefetching thread must not hold a reference to it.
    """
    if pinning_device is not None:
        torch.cuda.set_device(pinning_device)  # a new thread uses GPU 0, and pinning would create a context there
    consumed: list[Produced] = []
    taken: list[Sample] = []
    for produced in samples:
        if produced is None:
            continue
        if produced.sample is not None:
            if taken and produced.stage != consumed[-1].stage:
                rule = f"stage {produced.stage} begins after {len(taken)} samples of it"
                raise ConfigError("micro-batch", rule, "Make stages a whole number of steps long.")
            taken.append(produced.sample)
            produced = produced._replace(sample=None)  # only the cursor is still needed
        consumed.append(produced)
        if len(taken) == micro_batch_sizes[produced.stage]:
            yield make_batch(taken, pinning_device is not None), consumed
            consumed, taken = [], []


class _WorkerPart(IterableDataset[Any]):
    """The messages of one worker process, each with several turns; the last one may end with an error."""

    def __init__(self, stream: PackedStream, turns_per_message: int) -> None:
        self._stream, self._turns = stream, turns_per_message

    def __iter__(self) -> Iterator[list[Produced | Z2allError | None]]:
        worker = get_worker_info()
        assert worker is not None
        samples = self._stream.produce(worker.id, worker.num_workers)
        message: list[Produced | Z2allError | None] = []
        while True:
            try:
                message.append(next(samples))
            except Z2allError as error:  # raised here, torch would wrap it in a traceback
                # All messages have the same length; the loader stops at the first error.
                yield [*message, *[error] * (self._turns - len(message))]
                return
            if len(message) == self._turns:
                yield message
                message = []


def _from_workers(stream: PackedStream, num_workers: int) -> Iterator[Produced | None]:
    """Yield the rank's samples in order, made by worker processes."""
    shortest = min(stage.sequence_length for stage in stream.plan.schedule.stages)
    part = _WorkerPart(stream, max(1, min(TOKENS_PER_MESSAGE // shortest, MAX_SAMPLES_PER_MESSAGE)))
    loader: DataLoader[Any] = DataLoader(
        part,
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_unchanged,
        multiprocessing_context="spawn",
        prefetch_factor=2,
        generator=torch.Generator(),  # the default would draw from torch's global generator, which checkpoints save
    )
    with one_thread_each():
        messages = iter(loader)
    try:
        while True:
            # DataLoader returns one message of each worker in turn.
            for turn in zip(*[next(messages) for _ in range(num_workers)], strict=True):
                for produced in turn:
                    if isinstance(produced, Z2allError):
                        raise produced
                    yield produced
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error):
            raise
        rule = "ended unexpectedly, most likely out of memory"
        raise MachineError("a data worker", rule, f"Lower data.num_workers (now {num_workers}).") from None
    finally:
        del messages  # ends the workers


def _unchanged(message: Any) -> Any:
    """Replace torch's conversion of arrays to tensors in shared memory."""
    return message
