"""On request, a run finishes its step, saves a checkpoint and ends; the same command resumes it.

A request is a file `stop` in the run folder, which rank 0 checks once per step: any user can `touch` it from any
machine that mounts the folder. Signals to `z2all train` create it too: SIGTERM and SIGUSR1, which schedulers send
before preemption, SIGHUP at the end of a terminal session (not under nohup), and the first Ctrl-C. A second signal ends
everything at once. Before the ranks are started, the first one ends the command.
"""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from types import FrameType
from typing import NoReturn

from z2all_ds.base.console import say
from z2all_ds.base.errors import EXIT_REQUEUE
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.writer import count_events, read_records
from z2all_ds.train.processes.starter import STOP_SIGNALS


class StopSignals:
    """Receives the signals."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._events_before = folder, count_events(folder)
        self.received: signal.Signals | None = None

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.received is not None:
            if number == signal.SIGHUP:  # the end of a terminal session sends two: the shell's and the kernel's
                return
            # As Python does on Ctrl-C: the code that waits for the ranks ends them.
            raise KeyboardInterrupt(signal.Signals(number).name)
        self.received = signal.Signals(number)
        again = "send SIGTERM" if number == signal.SIGHUP else "repeat"
        try:
            self._folder.stop_request.touch()
        except OSError as error:  # raised from here, it would end the run without a checkpoint
            why = f"{self._folder.stop_request} cannot be written ({error.strerror}), so the run continues"
            say(f"{self.received.name}: {why}; `touch` the file later to save and stop, or {again} to end it at once")
            return
        what = "save a checkpoint and stop after this step" if self._takes_steps() else "stop before its first step"
        say(f"{self.received.name}: the run will {what}; {again} to end it at once")

    def _takes_steps(self) -> bool:
        """Return whether the ranks have taken a step since this launch, or its last restart."""
        events = islice(read_records(self._folder.events), self._events_before, None)
        kinds = [event["event"] for event in events if event.get("event") in ("started", "first_step", "fault")]
        return kinds[-1:] == ["first_step"]


@contextmanager
def requeue_on_signals() -> Iterator[None]:
    """Until the ranks are started, end with EXIT_REQUEUE on a stop signal. Ctrl-C is a KeyboardInterrupt."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        say(f"{signal.Signals(number).name}: ended outside of training; the same command starts or resumes the run")
        raise SystemExit(EXIT_REQUEUE)

    with _handled([number for number in STOP_SIGNALS if number != signal.SIGINT], end):
        yield


@contextmanager
def stop_on_signals(folder: RunFolder) -> Iterator[StopSignals]:
    """Handle signals while ranks train. A request left over from an earlier run is removed."""
    folder.stop_request.unlink(missing_ok=True)
    signals = StopSignals(folder)
    try:
        with _handled(STOP_SIGNALS, signals.take):
            yield signals
    finally:
        with suppress(OSError):  # it must not hide how the run ended
            folder.stop_request.unlink(missing_ok=True)


@contextmanager
def _handled(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Set the handler of these signals, and the earlier ones afterwards. An ignored SIGHUP (nohup) stays ignored."""
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    before = {number: signal.signal(number, handler) for number in numbers if number != signal.SIGHUP or not is_nohup}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
