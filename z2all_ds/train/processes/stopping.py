"""On request, a run finishes its step, saves a checkpoint and ends; the same command resumes it.

A request is a file `stop` in the run folder, which rank 0 checks once per step: any user can `touch` it from any
machine that mounts the folder. Signals to `z2all train` create it too: SIGTERM and SIGUSR1, which schedulers send
before preemption, and the first Ctrl-C. A second signal ends everything at once.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from z2all_ds.base.console import say
from z2all_ds.base.run_folder import RunFolder

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopSignals:
    """Receives the signals."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.received: signal.Signals | None = None

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.received is not None:
            # As Python does on Ctrl-C: the code that waits for the ranks ends them.
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        self._folder.stop_request.touch()
        say(f"{self.received.name}: the run will save a checkpoint and stop after this step; repeat to end it at once")


@contextmanager
def stop_on_signals(folder: RunFolder) -> Iterator[StopSignals]:
    """Handle signals while ranks train. A request left over from an earlier run is removed."""
    folder.stop_request.unlink(missing_ok=True)
    signals = StopSignals(folder)
    before = {number: signal.signal(number, signals.take) for number in STOP_SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        folder.stop_request.unlink(missing_ok=True)
