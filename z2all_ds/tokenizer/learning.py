"""Runs a library's trainer so that a person sees how far it is and Ctrl-C works at once.

Trainers stay in their own code for minutes, where Python cannot deliver Ctrl-C. So they run in a thread of their own
(they let go of the interpreter lock), while this one shows the bar and listens.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from z2all_ds.console import heartbeat, progress

Learned = TypeVar("Learned")
LOOK_EVERY_SECONDS = 0.1


class Reading:
    """Hands texts to a trainer and counts them. What goes wrong while reading is kept, as trainers may swallow it."""

    def __init__(self, sample: Iterator[tuple[int, str]]) -> None:
        self._sample = sample
        self.bytes_on_disk = self.bytes_of_text = 0
        self.over, self.stop = threading.Event(), threading.Event()
        self.failure: BaseException | None = None

    def texts(self) -> Iterator[str]:
        try:
            for size, text in self._sample:
                if self.stop.is_set():
                    return
                self.bytes_on_disk += size
                self.bytes_of_text += len(text.encode())
                yield text
        except BaseException as error:
            self.failure = error
        finally:
            self.over.set()


class _Work(threading.Thread, Generic[Learned]):
    def __init__(self, job: Callable[[], Learned]) -> None:
        super().__init__(daemon=True)  # it must not keep the process alive after Ctrl-C
        self._job = job
        self.result: list[Learned] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.result.append(self._job())
        except BaseException as error:
            self.failure = error


def learn_watched(
    sample: Iterator[tuple[int, str]], total_bytes: int, learn: Callable[[Iterator[str]], Learned], merging: str
) -> tuple[Learned, int]:
    """What `learn` makes of the texts, and their bytes. `sample` gives (bytes on disk, text)."""
    reading = Reading(sample)
    work = _Work(lambda: learn(reading.texts()))
    work.start()
    try:
        with progress("reading text", total_bytes / 1e6, "MB") as advance:
            shown = 0
            while work.is_alive() and not reading.over.wait(LOOK_EVERY_SECONDS):
                advance((reading.bytes_on_disk - shown) / 1e6)
                shown = reading.bytes_on_disk
            advance((reading.bytes_on_disk - shown) / 1e6)
        with heartbeat(merging):
            while work.is_alive():
                work.join(LOOK_EVERY_SECONDS)
    except BaseException:
        reading.stop.set()
        raise
    for failure in (reading.failure, work.failure):
        if failure is not None:
            raise failure
    return work.result[0], reading.bytes_of_text
