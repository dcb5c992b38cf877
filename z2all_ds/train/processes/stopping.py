"""Asked to stop, a run finishes its step, saves a checkpoint and ends; the same command goes on from there.

Asking means to leave a file `stop` in the run's folder, which rank 0 looks for once a step: any user can `touch` it,
from any machine that sees the folder, whoever started the ranks. Signals to `z2all train` do it too: SIGTERM and
SIGUSR1, as schedulers send before they take a machine away, and the first Ctrl-C. A second one ends everything at once.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from z2all_ds.base.console import say
from z2all_ds.base.run_folder import RunFolder

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopSignals:
    """What has come in."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.received: signal.Signals | None = None

    def take(self, number: int, frame: FrameType | None) -> None:
        """A signal's handler."""
        if self.received is not None:
            # As Python does by itself on Ctrl-C: whoever waits for the ranks ends them on its way out.
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        self._folder.stop_request.touch()
        say(f"{self.received.name}: after this step the run saves a checkpoint and stops; once more ends it at once")


@contextmanager
def stop_on_signals(folder: RunFolder) -> Iterator[StopSignals]:
    """While ranks train. A request left over from before is not meant for them."""
    folder.stop_request.unlink(missing_ok=True)
    signals = StopSignals(folder)
    before = {number: signal.signal(number, signals.take) for number in STOP_SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        folder.stop_request.unlink(missing_ok=True)
