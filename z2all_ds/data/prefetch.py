"""A bounded queue filled by a background thread: batches are made while the model computes.

Tokenizers release the interpreter lock while they work, and so does the GPU, so one thread keeps a GPU busy. It dies
with `close()`, with the end of the iterator, with an exception (which is raised where the items are consumed), and when
its `Prefetcher` is forgotten without a word.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

THREAD_NAME = "z2all-data-prefetch"
_LOOK_UP_EVERY_SECONDS = 0.1
"""How long a thread with a full queue needs at most to notice that it should end."""

Item = TypeVar("Item")


class _End:
    """Last thing in a queue: the iterator ended, or failed with `error`."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetcher(Generic[Item]):
    """Iterates over `items`, up to `depth` ahead of the consumer."""

    def __init__(self, items: Iterator[Item], depth: int, at_thread_start: Callable[[], None] | None = None) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._end: _End | None = None
        # The thread must not hold `self`, or a forgotten Prefetcher would never be collected and never stop it.
        self._thread = threading.Thread(
            target=_fill, args=(items, self._queue, self._stop, at_thread_start), name=THREAD_NAME, daemon=True
        )
        weakref.finalize(self, _end_thread, self._thread, self._stop)  # also runs when the interpreter exits
        self._thread.start()

    def __iter__(self) -> "Prefetcher[Item]":
        return self

    def __next__(self) -> Item:
        if self._end is None:
            item = self._queue.get()
            if not isinstance(item, _End):
                return item
            self._end = item
            self._thread.join()
        if self._end.error is not None:
            raise self._end.error
        raise StopIteration

    def close(self) -> None:
        """Ends the thread and waits for it; what was made ahead is dropped."""
        _end_thread(self._thread, self._stop)
        self._end = self._end or _End(None)


def _end_thread(thread: threading.Thread, stop: threading.Event) -> None:
    """Waits as well: a thread still inside a tokenizer while the interpreter is taken down can crash the process."""
    stop.set()
    if thread is not threading.current_thread():  # the garbage collector may run this in any thread
        thread.join()


def _fill(
    items: Iterator[Any], out: "queue.Queue[Any]", stop: threading.Event, at_thread_start: Callable[[], None] | None
) -> None:
    end = _End(None)
    try:
        if at_thread_start is not None:
            at_thread_start()
        for item in items:
            if not _put(item, out, stop):
                return
    except BaseException as error:  # whatever it is, the consumer must hear of it rather than wait for ever
        end = _End(error)
    finally:
        if hasattr(items, "close"):  # a generator may have processes to end
            items.close()
    _put(end, out, stop)


def _put(item: Any, out: "queue.Queue[Any]", stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            out.put(item, timeout=_LOOK_UP_EVERY_SECONDS)
            return True
        except queue.Full:
            continue
    return False
