"""Micro-batches of a stream, made ahead: by a thread, and by worker processes where tokenizing needs several cores.

Workers are those of torch's DataLoader, started fresh (not forked: a rank has threads and a GPU) and each with its part
of the rank's lanes. They send compact samples through pipes rather than shared memory, which containers have little of.
The thread deals the workers' samples together in turn, makes the columns of each batch, and pins them.
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
MOST_SAMPLES_PER_MESSAGE = 32
"""A worker sends so much at a time: for short samples, the cost of a message would be that of making them."""


class BatchLoader:
    """Endless micro-batches of a stream, made ahead from the first one asked for.

    The state is the stream's: it moves when a batch is handed out. Load a state here rather than into the stream, so
    that batches made ahead of the old one are dropped. Use as a context manager, or `close()` it.
    """

    def __init__(
        self,
        stream: PackedStream,
        micro_batch_size: int | Sequence[int],
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_batches: int = 4,
    ) -> None:
        """Several micro-batch sizes are those of the stages: fewer samples at a time where they are longer."""
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
            say("data: pin_memory is on, but there is no CUDA device; batches stay in plain memory")
            pin_memory = False
        self.stream = stream
        self.num_workers = num_workers
        self._micro_batch_sizes = sizes
        self._pin_memory = pin_memory
        self._prefetch_batches = prefetch_batches
        self._prefetcher: Prefetcher[tuple[Batch, list[Produced]]] | None = None

    def __iter__(self) -> "BatchLoader":
        return self

    def __next__(self) -> Batch:
        if self._prefetcher is None:
            samples = self.stream.produce() if self.num_workers == 0 else _from_workers(self.stream, self.num_workers)
            batches = make_batches(samples, self._micro_batch_sizes, self._pin_memory)
            self._prefetcher = Prefetcher(batches, self._prefetch_batches, _DeviceSetter(self._pin_memory))
        batch, consumed = next(self._prefetcher)
        for produced in consumed:
            self.stream.mark_consumed(produced)
        return batch

    def state_dict(self) -> StreamState:
        """The state after the last batch handed out, however far the workers are ahead."""
        return self.stream.state_dict()

    def load_state_dict(self, state: StreamState, allow_data_change: bool = False) -> None:
        self.close()
        self.stream.load_state_dict(state, allow_data_change)

    def close(self) -> None:
        """Ends thread and workers. The next batch asked for starts others, from the last consumed batch on."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_batches(
    samples: Iterator[Produced | None], micro_batch_sizes: Sequence[int], pin_memory: bool
) -> Iterator[tuple[Batch, list[Produced]]]:
    """Batches, each with what moves the state by it. A plain function: the thread must not hold the loader."""
    consumed: list[Produced] = []
    taken: list[Sample] = []
    for produced in samples:
        if produced is None:
            continue
        if produced.sample is not None:
            if taken and produced.stage != consumed[-1].stage:
                rule = f"stage {produced.stage} begins after {len(taken)} samples of one"
                raise ConfigError("micro-batch", rule, "Let stages last for whole steps.")
            taken.append(produced.sample)
            produced = produced._replace(sample=None)  # the cursor is all that is needed any more
        consumed.append(produced)
        if len(taken) == micro_batch_sizes[produced.stage]:
            yield make_batch(taken, pin_memory), consumed
            consumed, taken = [], []


class _WorkerPart(IterableDataset[Any]):
    """What one worker process makes: messages of several turns each; the last one may end with an error."""

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
            except Z2allError as error:  # torch would rewrap it, and the line for the user be lost in a traceback
                # What stands after an error is not looked at; it only makes the message as long as the others.
                yield [*message, *[error] * (self._turns - len(message))]
                return
            if len(message) == self._turns:
                yield message
                message = []


def _from_workers(stream: PackedStream, num_workers: int) -> Iterator[Produced | None]:
    """The rank's samples in order, made by worker processes."""
    shortest = min(stage.sequence_length for stage in stream.plan.schedule.stages)
    part = _WorkerPart(stream, max(1, min(TOKENS_PER_MESSAGE // shortest, MOST_SAMPLES_PER_MESSAGE)))
    loader: DataLoader[Any] = DataLoader(
        part,
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        multiprocessing_context="spawn",
        prefetch_factor=2,
        generator=torch.Generator(),  # torch's own would move on by one draw, and with it what a checkpoint keeps
    )
    with one_thread_each():
        messages = iter(loader)
    try:
        while True:
            # one message of each worker in turn: DataLoader keeps that order
            for turn in zip(*[next(messages) for _ in range(num_workers)], strict=True):
                for produced in turn:
                    if isinstance(produced, Z2allError):
                        raise produced
                    yield produced
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error):
            raise
        rule = "ended without a word, most often for want of memory"
        raise MachineError("a data worker", rule, f"Lower data.num_workers (now {num_workers}).") from None
    finally:
        del messages  # ends the workers


def _as_it_is(message: Any) -> Any:
    """torch would turn arrays into tensors in shared memory."""
    return message


class _DeviceSetter:
    """Puts the thread on the rank's GPU: a new thread stands on GPU 0, and pinning would open a context there."""

    def __init__(self, pin_memory: bool) -> None:
        self.device = torch.cuda.current_device() if pin_memory else None

    def __call__(self) -> None:
        if self.device is not None:
            torch.cuda.set_device(self.device)
