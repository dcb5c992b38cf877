"""When long reading may go on: a page that is just being opened comes first."""

import time

BETWEEN_STEPS_SECONDS = 0.001
"""For requests that wait for this process's only interpreter."""
GIVE_WAY_SECONDS = 2.0


class Pace:
    """One for all runs: what any of them reads, a page of all of them waits for."""

    def __init__(self) -> None:
        self._until = 0.0

    def give_way(self) -> None:
        """A page was asked for: its files and its first curves are next."""
        self._until = time.monotonic() + GIVE_WAY_SECONDS

    def seconds_to_wait(self) -> float:
        return max(BETWEEN_STEPS_SECONDS, self._until - time.monotonic())
