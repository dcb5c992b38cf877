"""Runs the same function over many tasks: here, in processes of this machine, or as tasks of a Ray cluster.

Tasks and results are small and picklable; the data itself goes through files. Results come as they are finished, with
the number of their task. If one fails, or the user presses Ctrl-C, no worker is left behind.
"""

import logging
import multiprocessing
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from z2all_ds.base.errors import ClusterError, ConfigError, MachineError, Z2allError
from z2all_ds.base.machine import one_thread_each, usable_cores
from z2all_ds.base.parent_watch import follow_owner, owner_mark

Task = TypeVar("Task")
Result = TypeVar("Result")
Run = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[tuple[int, Any]]]

KNOCK_SECONDS = 5.0
TASKS_IN_FLIGHT_PER_RAY_CPU = 2
"""Enough that no CPU waits for the driver, few enough that a stop does not leave thousands queued."""


@dataclass(frozen=True)
class Executor:
    """Where work is done."""

    workers: int | None = None
    """Processes on this machine; None is one for each core."""
    ray: str | None = None
    """Address of a Ray cluster (`auto`, `host:6379`, `ray://host:10001`, or `local` for one on this machine)."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"workers {self.workers}", "must be at least 1", "Leave it out for one a core.")

    def run(self, work: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """(task number, result) of each task, in the order in which they finish."""
        with self.opened() as run:
            yield from run(work, tasks)

    @contextmanager
    def opened(self) -> Iterator[Run]:
        """A `run` that keeps its workers from one call to the next; starting them takes a second."""
        if self.ray is not None:
            with _connected_ray(self.ray) as ray:
                yield partial(_run_on_ray, ray, self.ray)
        else:
            with _Processes(self.workers or usable_cores()) as processes:
                yield processes.run


def _start_worker(owner: str) -> None:
    # Ctrl-C reaches the whole process group; only the owner answers it, and then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    follow_owner(owner)


class _Processes:
    """Worker processes, started when there is more than one task; none is left when the block is left."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pool: ProcessPoolExecutor | None = None
        self._size = 0
        self._others = set(multiprocessing.active_children())

    def __enter__(self) -> "_Processes":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - self._others:
            process.terminate()
            process.join()

    def run(self, work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        wanted = min(self._most, len(tasks))
        if wanted <= 1:
            for number, task in enumerate(tasks):
                yield number, work(task)
            return
        pool = self._pool_of(wanted)
        try:
            with one_thread_each():  # the processes start with the first task
                numbers = {pool.submit(work, task): number for number, task in enumerate(tasks)}
            open_futures = set(numbers)
            while open_futures:
                finished, open_futures = wait(open_futures, return_when=FIRST_COMPLETED)
                for future in finished:
                    yield numbers[future], future.result()
        except BrokenProcessPool:
            fix = f"Give fewer --workers (now {wanted}), or more memory; what is finished is kept."
            raise MachineError("a worker process", "ended without a word, most often for want of memory", fix) from None

    def _pool_of(self, size: int) -> ProcessPoolExecutor:
        if self._pool is None or self._size < size:
            if self._pool is not None:
                self._pool.shutdown()
            # Not fork: the driver has threads (the progress bar, Arrow), and a forked child can inherit a held lock.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                size, mp_context=context, initializer=_start_worker, initargs=(owner_mark(),)
            )
            self._size = size
        return self._pool


def _run_on_ray(ray: Any, address: str, work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Never cancels a task: one that ends in the same moment makes Ray 2.60 abort this process.

    Where the connection is ours, its end also ends what still runs. In one that was there before, the few tasks in
    flight run to their end, and what they finish is kept.
    """
    remote = ray.remote(max_retries=2)(work)
    waiting = list(reversed(list(enumerate(tasks))))
    running: dict[Any, int] = {}
    while waiting or running:
        slots = max(1, int(ray.cluster_resources().get("CPU", 1))) * TASKS_IN_FLIGHT_PER_RAY_CPU
        while waiting and len(running) < slots:
            number, task = waiting.pop()
            running[remote.remote(task)] = number
        finished, _ = ray.wait(list(running), num_returns=1)
        for reference in finished:
            number = running.pop(reference)
            try:
                yield number, ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, Z2allError):
                    raise error.cause from None
                raise
            except ray.exceptions.RayError as error:
                fix = "Look at `ray status` and the logs of that node, then run again: what is finished is kept."
                raise ClusterError(f"Ray at {address}", f"a task was lost ({error})", fix) from None


@contextmanager
def _connected_ray(address: str) -> Iterator[Any]:
    """Ray; a connection that was there before stays."""
    try:
        import ray
    except ImportError:
        raise MachineError("--ray", "Ray is not installed", "Run pip install 'z2all_ds[ray]'.") from None
    if ray.is_initialized():
        yield ray
        return
    where: dict[str, Any] = {"include_dashboard": False} if address == "local" else {"address": address}
    try:
        _knock(address)
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **where)
    except Exception as error:  # OSError, TimeoutError, ValueError: Ray has no family of its own for it
        fix = "Start one with `ray start --head`, give its address, or `local` for one on this machine."
        raise ClusterError(f"Ray at {address}", f"not reachable ({error})", fix) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Ray itself tries a dead address for five minutes and more."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), KNOCK_SECONDS).close()
