"""A background thread that fills a bounded queue: batches are made while the model computes.

Tokenizers release the interpreter lock while they work, and so does the GPU, so one thread keeps a GPU busy. It ends
after `close()`, at the end of the iterator, with an exception (which is raised in the consumer), and when its
`Prefetcher` is garbage-collected.
"""

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

THREAD_NAME = "z2all-data-prefetch"

Item = TypeVar("Item")


class _End:
    """Last item in the queue: the iterator ended, or failed with `error`."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetcher(Generic[Item]):
    """Iterates over `items`, up to `depth` ahead of the consumer."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._permits, stop = threading.Semaphore(depth), threading.Event()
        self._end: _End | None = None
        # The thread must not refer to `self`, or an unused Prefetcher would never be collected.
        arguments = (items, self._made, self._permits, stop)
        self._thread = threading.Thread(target=_fill, args=arguments, name=THREAD_NAME, daemon=True)
        # Also runs when the interpreter exits.
        self._stop_thread = weakref.finalize(self, _end_thread, self._thread, self._permits, stop)
        self._thread.start()

    def __iter__(self) -> "Prefetcher[Item]":
        return self

    def __next__(self) -> Item:
        if self._end is None:
            item = self._made.get()
            if not isinstance(item, _End):
                self._permits.release()
                return item
            self._end = item
            self._thread.join()
        if self._end.error is not None:
            raise self._end.error
        raise StopIteration

    def close(self) -> None:
        """End the thread and wait for it; drop the items made ahead."""
        self._stop_thread()
        self._end = self._end or _End(None)


def _end_thread(thread: threading.Thread, permits: threading.Semaphore, stop: threading.Event) -> None:
    """End the thread and wait: one inside a tokenizer while the interpreter shuts down can crash the process."""
    stop.set()
    permits.release()
    if thread is not threading.current_thread():  # the garbage collector may run this in any thread
        thread.join()


def _fill(
    items: Iterator[Any], made: "queue.SimpleQueue[Any]", permits: threading.Semaphore, stop: threading.Event
) -> None:
    end = _End(None)
    try:
        while permits.acquire() and not stop.is_set():
            made.put(next(items))
    except StopIteration:
        pass
    except BaseException as error:  # the consumer must get any error rather than wait forever
        end = _End(error)
    finally:
        if hasattr(items, "close"):  # ends the processes of a generator
            items.close()
    made.put(end)
