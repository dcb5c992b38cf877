"""From the moment training is asked for to its first loss, by phase.

`z2all train` tells its ranks when that was, and `launch` is what it did until their processes began: checks, the
building of ops. Under another launcher the count begins with the rank's process. Imports stand in several places on the
way, so a phase may be told of more than once; its times are added up.
"""

import os
import time
from collections.abc import Callable

from z2all_ds.base.machine import process_start_time

PHASES = ("launch", "imports", "device", "process_group", "model", "engine", "dry_run", "data", "restore", "first_step")

ASKED_VARIABLE = "Z2ALL_ASKED"
"""time.monotonic() when training was asked for; on one machine that clock is the same for all processes."""

_LOADED = time.monotonic()
_process_start_is_taken = False


class Startup:
    """Told "phase done" at the end of each; whatever lies between two calls belongs to the second."""

    def __init__(self) -> None:
        self.on_phase: Callable[[], None] = lambda: None
        """Called at the end of every phase: the rank is alive."""
        self._count_from_process_start()

    def _count_from_process_start(self) -> None:
        """The first one of a process counts from the process's own start; a later training in it from here."""
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
        """For events.jsonl: the whole and each phase, units in the names."""
        phases = {f"{phase}_seconds": round(seconds, 3) for phase, seconds in self._seconds.items()}
        return {"seconds": round(self.total_seconds, 3), **phases}

    def line(self) -> str:
        """For the terminal; what took no time is left out."""
        phases = [f"{name.replace('_', ' ')} {value:.1f}" for name, value in self._seconds.items() if value >= 0.05]
        return f"first loss after {self.total_seconds:.1f} s: {', '.join(phases)}"


def process_age_seconds() -> float:
    """Since the start of this process, to a hundredth; without /proc since this file was loaded."""
    since_loaded = time.monotonic() - _LOADED
    ticks = process_start_time(os.getpid())
    if ticks is None or not hasattr(time, "CLOCK_BOOTTIME"):
        return since_loaded
    # Some sandboxes count a process's start from elsewhere than the clock: never younger than this file's loading.
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return max(age, since_loaded)
