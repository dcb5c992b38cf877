"""Time from the start of the command to the first loss, by phase.

`z2all train` passes its start time to the ranks; the phase `launch` is the time until their processes start (checks,
building ops). Under another launcher, counting starts with the rank's process. Imports happen at several points, so a
phase may be reported more than once; its times are added up.
"""

import os
import time
from collections.abc import Callable

from z2all_ds.base.machine import process_start_time

PHASES = ("launch", "imports", "device", "process_group", "model", "engine", "dry_run", "data", "restore", "first_step")

ASKED_VARIABLE = "Z2ALL_ASKED"
"""time.monotonic() at the start of the command; on one machine this clock is the same for all processes."""

_LOADED = time.monotonic()
_process_start_is_taken = False


class Startup:
    """Call `done(phase)` at the end of each phase; the time between two calls belongs to the second."""

    def __init__(self) -> None:
        self.on_phase: Callable[[], None] = lambda: None
        """Called at the end of every phase, as a heartbeat."""
        self._count_from_process_start()

    def _count_from_process_start(self) -> None:
        """Count from the start of the process; a later training in the same process counts from this call."""
        global _process_start_is_taken
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._last = time.monotonic()
        if not _process_start_is_taken:
            self._last -= process_age_seconds()
            asked = float(os.environ.get(ASKED_VARIABLE, self._last))
            self._seconds["launch"] = max(0.0, self._last - asked)
        _process_start_is_taken = True

    def done(self, phase: str) -> None:
        assert phase in PHASES, phase
        now = time.monotonic()
        self._seconds[phase] += now - self._last
        self._last = now
        self.on_phase()

    @property
    def total_seconds(self) -> float:
        return sum(self._seconds.values())

    def as_event(self) -> dict[str, float]:
        """Return the total and each phase for events.jsonl, units in the names."""
        phases = {f"{phase}_seconds": round(seconds, 3) for phase, seconds in self._seconds.items()}
        return {"seconds": round(self.total_seconds, 3), **phases}

    def line(self) -> str:
        """Return the line for the terminal, without phases that took no time."""
        phases = [f"{name.replace('_', ' ')} {value:.1f}" for name, value in self._seconds.items() if value >= 0.05]
        return f"first loss after {self.total_seconds:.1f} s: {', '.join(phases)}"


def process_age_seconds() -> float:
    """Return the age of this process, to a hundredth of a second; without /proc the time since this module loaded."""
    since_loaded = time.monotonic() - _LOADED
    ticks = process_start_time(os.getpid())
    if ticks is None or not hasattr(time, "CLOCK_BOOTTIME"):
        return since_loaded
    # Some sandboxes report start times on another clock: the age is never less than the time since loading.
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return max(age, since_loaded)
