"""Runs one function over many tasks: in this process, in worker processes, or as tasks of a Ray cluster.

Tasks and results are small and picklable; the data goes through files. Results arrive in the order of completion, with
the number of their task. After an error or Ctrl-C no worker keeps running.

Running tasks write their progress to small files, which the driver reads. Files work the same for a local process and
for a task on another machine.
"""

import logging
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

from z2all_ds.base.atomic import open_own
from z2all_ds.base.console import Advance, progress
from z2all_ds.base.errors import ClusterError, ConfigError, MachineError, Z2allError
from z2all_ds.base.machine import one_thread_each, usable_cores
from z2all_ds.base.parent_watch import follow_owner, owner_mark

Task = TypeVar("Task")
Result = TypeVar("Result")
Run = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[tuple[int, Any]]]

RAY_CONNECT_TIMEOUT_SECONDS = 5.0
TASKS_IN_FLIGHT_PER_RAY_CPU = 2
"""Keeps every CPU busy without leaving thousands of queued tasks behind when the build stops."""
PROGRESS_EVERY_SECONDS = 0.5
_COUNTS = struct.Struct("<qq")


@dataclass(frozen=True)
class Executor:
    """Settings of parallel work."""

    workers: int | None = None
    """Processes on this machine; None means one per core."""
    ray: str | None = None
    """Address of a Ray cluster (`auto`, `host:6379`, `ray://host:10001`, or `local` to start one on this machine)."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"workers {self.workers}", "must be at least 1", "Omit it to use one per core.")
        if self.workers is not None and self.ray is not None:
            raise ConfigError("workers", "a Ray cluster decides how many it starts", "Omit --workers or --ray.")

    def run(self, work: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """Yield (task number, result) of each task, in the order of completion."""
        with self.opened() as run:
            yield from run(work, tasks)

    @contextmanager
    def opened(self) -> Iterator[Run]:
        """Yield a `run` function that keeps its workers between calls, because starting them takes a second."""
        if self.ray is not None:
            with _connected_ray(self.ray) as ray:
                yield partial(_run_on_ray, ray, self.ray)
        else:
            with _worker_processes(self.workers or usable_cores()) as run:
                yield run


def run_all(
    run: Run,
    work: Callable[[Task], Result],
    tasks: Sequence[Task],
    label: str,
    sizes: Sequence[int],
    unit: str = "bytes",
) -> list[Result]:
    """Run all tasks with a progress bar over their sizes, and return the results in the order of the tasks."""
    results: dict[int, Result] = {}
    with progress(label, sum(sizes), unit) as advance:
        for number, result in run(work, tasks):
            results[number] = result
            advance(sizes[number])
    return [results[number] for number in range(len(tasks))]


def _start_worker(owner: str) -> None:
    # Ctrl-C reaches the whole process group; only the owner handles it, and then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    follow_owner(owner)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while workers are started. They inherit this until `_start_worker` ignores it; else a worker
    that is still importing its modules would print a traceback."""
    resource_tracker.ensure_running()  # started later, it would end the hold
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _worker_processes(max_workers: int) -> Iterator[Run]:
    """Yield a `run` function over a pool of processes; they start when needed and end with the block."""
    pool: ProcessPoolExecutor | None = None
    other_processes = set(multiprocessing.active_children())

    def run(work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        nonlocal pool
        workers = min(max_workers, len(tasks))
        if workers <= 1:
            for number, task in enumerate(tasks):
                yield number, work(task)
            return
        if pool is None:
            # Not fork: the driver has threads (the progress bar, Arrow), and a forked child can inherit a held lock.
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(max_workers, context, initializer=_start_worker, initargs=(owner_mark(),))
        try:
            with one_thread_each(), _interrupts_held():  # submit() starts a process if none is idle
                numbers = {pool.submit(work, task): number for number, task in enumerate(tasks)}
            for future in as_completed(numbers):
                yield numbers[future], future.result()
        except BrokenProcessPool:
            fix = f"Use fewer --workers (now {workers}) or more memory; finished work is kept."
            raise MachineError("a worker process", "ended unexpectedly, probably out of memory", fix) from None

    try:
        yield run
    finally:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - other_processes:
            process.terminate()
            process.join()


def _run_on_ray(ray: Any, address: str, work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Run the tasks on Ray. Never cancels one: if a task ends at the same moment, Ray 2.60 aborts this process.

    Closing our own connection also ends running tasks. On a connection that existed before, the few tasks in flight run
    to completion, and their output is kept.
    """
    remote = ray.remote(max_retries=2)(work)
    waiting = list(reversed(list(enumerate(tasks))))
    running: dict[Any, int] = {}
    while waiting or running:
        slots = max(1, int(ray.cluster_resources().get("CPU", 1))) * TASKS_IN_FLIGHT_PER_RAY_CPU
        while waiting and len(running) < slots:
            number, task = waiting.pop()
            running[remote.remote(task)] = number
        (reference,), _ = ray.wait(list(running), num_returns=1)
        number = running.pop(reference)
        try:
            yield number, ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Z2allError):
                raise error.cause from None
            raise
        except ray.exceptions.RayError as error:
            fix = "Check `ray status` and the logs of that node, then run again; finished work is kept."
            raise ClusterError(f"Ray at {address}", f"a task was lost ({error})", fix) from None


@contextmanager
def _connected_ray(address: str) -> Iterator[Any]:
    """Yield the Ray module, connected. A connection that existed before stays open."""
    try:
        import ray
    except ImportError:
        raise MachineError("--ray", "Ray is not installed", "Run pip install 'z2all_ds[ray]'.") from None
    if ray.is_initialized():
        yield ray
        return
    where: dict[str, Any] = {"include_dashboard": False} if address == "local" else {"address": address}
    try:
        # Ray itself retries an unreachable address for more than five minutes.
        host, colon, port = address.removeprefix("ray://").rpartition(":")
        if colon and port.isdigit():
            socket.create_connection((host, int(port)), RAY_CONNECT_TIMEOUT_SECONDS).close()
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **where)
    except Exception as error:  # OSError, TimeoutError, ValueError: Ray has no common base class for them
        fix = "Start a cluster with `ray start --head` and give its address, or use `local` to start one here."
        raise ClusterError(f"Ray at {address}", f"not reachable ({error})", fix) from None
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def progress_file(path: Path, documents: Callable[[], int]) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts raw bytes; they and `documents()` are written to a file for the driver to read."""
    file, total, next_write = open_own(path, os.O_WRONLY, 0o644), 0, 0.0

    def advance(raw_bytes: int) -> None:
        nonlocal total, next_write
        total += raw_bytes
        now = time.monotonic()
        if now >= next_write:
            next_write = now + PROGRESS_EVERY_SECONDS
            os.pwrite(file, _COUNTS.pack(total, documents()), 0)

    try:
        yield advance
    finally:
        os.close(file)
        path.unlink(missing_ok=True)


def read_progress(folder: Path) -> tuple[int, int]:
    """Return (raw bytes, documents) processed by all running tasks of a folder."""
    raw_bytes = documents = 0
    for path in folder.glob("*.progress"):
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # the task has just finished
            continue
        if len(data) == _COUNTS.size:
            some_bytes, some_documents = _COUNTS.unpack(data)
            raw_bytes, documents = raw_bytes + some_bytes, documents + some_documents
    return raw_bytes, documents


@contextmanager
def task_progress(folder: Path, advance: Advance) -> Iterator[Callable[[int, int], None]]:
    """Advance a bar by the progress files of running tasks. Yield a function that counts a finished task."""
    finished_bytes = finished_documents = shown_bytes = 0
    lock, over = threading.Lock(), threading.Event()

    def show(running_bytes: int, running_documents: int) -> None:
        nonlocal shown_bytes
        with lock:
            # A task may finish between reading its file and counting it; the bar must not go back.
            seen = max(shown_bytes, finished_bytes + running_bytes)
            advance(seen - shown_bytes, f"{finished_documents + running_documents:,} records")
            shown_bytes = seen

    def watch() -> None:
        while not over.wait(PROGRESS_EVERY_SECONDS):
            show(*read_progress(folder))

    def count_finished(raw_bytes: int, documents: int) -> None:
        nonlocal finished_bytes, finished_documents
        with lock:
            finished_bytes, finished_documents = finished_bytes + raw_bytes, finished_documents + documents

    thread = threading.Thread(target=watch, name="task-progress", daemon=True)
    thread.start()
    try:
        yield count_finished
    finally:
        over.set()
        thread.join()
        show(0, 0)
