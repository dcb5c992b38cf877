"""Tests for the prefetching thread: it works ahead up to its limit, passes errors on, and ends."""

import gc
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from z2all_ds.data.prefetch import THREAD_NAME, Prefetcher


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def test_all_items_are_returned_in_order_and_the_thread_ends() -> None:
    prefetcher = Prefetcher(iter(range(100)), depth=3)
    assert list(prefetcher) == list(range(100))
    assert list(prefetcher) == []
    assert not prefetch_threads()


def test_at_most_depth_items_are_prepared_ahead() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in itertools.count():
            made.append(number)
            yield number

    prefetcher = Prefetcher(items(), depth=3)
    wait_until(lambda: len(made) >= 3)
    time.sleep(0.05)
    assert len(made) == prefetcher._made.qsize() == 3
    assert next(prefetcher) == 0
    wait_until(lambda: len(made) == 4)
    prefetcher.close()
    assert not prefetch_threads()


def test_an_error_is_raised_after_earlier_items_and_on_every_later_call() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("disk on fire")

    prefetcher = Prefetcher(items(), depth=2)
    assert next(prefetcher) == 1
    for _ in range(2):
        with pytest.raises(OSError, match="disk on fire"):
            next(prefetcher)
    prefetcher.close()
    assert not prefetch_threads()


def test_close_may_be_called_twice_and_ends_the_iteration() -> None:
    prefetcher = Prefetcher(itertools.count(), depth=1)
    prefetcher.close()
    prefetcher.close()
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_exit_without_close_is_quiet() -> None:
    """The interpreter exits without an error, and modules that do not need torch do not import it."""
    code = """
import itertools, sys
import z2all_ds.data, z2all_ds.data.data_plan
from z2all_ds.data.prefetch import Prefetcher
prefetcher = Prefetcher(itertools.count(), depth=1)
assert next(prefetcher) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_garbage_collected_prefetcher_ends_its_thread() -> None:
    prefetcher = Prefetcher(itertools.count(), depth=1)
    assert next(prefetcher) == 0
    del prefetcher
    gc.collect()
    wait_until(lambda: not prefetch_threads())
