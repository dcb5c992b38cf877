"""Detects bad steps by their loss, the loss of each domain and the gradient norm.

A value is an outlier if it exceeds the median of the latest good steps by more than the configured number of
deviations. The deviation is derived from the median change between neighbouring steps of a longer window, so that a
steeply falling loss does not look like a noisy one; medians are not affected by a few extreme values. Non-finite values
are always outliers. Only good steps are remembered, so a long series of bad steps does not become the baseline. Plain
numbers, no torch: every rank reaches the same verdict from the same numbers.
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from z2all_ds.base.config.sections import GuardSection

GRAD_NORM = "grad_norm"
TO_STANDARD_DEVIATION = 1.4826
"""Factor from the median absolute deviation to the standard deviation of a normal distribution."""
LATEST = 0.25
"""Fraction of the window used for the current level."""
LEAST_DEVIATION = 0.01
"""In logarithms. Otherwise a small change would be an outlier if the values so far hardly differ."""
LEAST_DEVIATION_OF_NORMS = 0.25
"""In healthy runs the gradient norm varies by factors of 2 to 3; clipping handles that."""


@dataclass(frozen=True)
class Outlier:
    """One value that is too large or not finite."""

    name: str
    value: float
    limit: float | None
    """The limit it exceeded; None if the value is not finite."""

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g}" + ("" if self.limit is None else f" (limit {self.limit:.4g})")


class SpikeGuard:
    """Checks each step, remembers the good ones and counts the bad ones."""

    def __init__(self, section: GuardSection) -> None:
        self._section = section
        self._windows: dict[str, deque[float]] = {}
        self._bad = deque[bool](maxlen=section.window_steps)
        """Which of the latest steps were bad; a rollback to a checkpoint does not reset it."""

    @property
    def bad_steps(self) -> int:
        """Number of bad steps among the latest `window_steps`."""
        return sum(self._bad)

    def count(self, bad: bool) -> None:
        self._bad.append(bad)

    def outliers(self, values: Mapping[str, float]) -> list[Outlier]:
        """Return the outliers among one step's values; without enough good steps, only non-finite values count."""
        found = []
        for name, value in values.items():
            limit = self.limit(name)
            if not math.isfinite(value):
                found.append(Outlier(name, value, None))
            elif limit is not None and value > limit:
                found.append(Outlier(name, value, limit))
        return found

    def limit(self, name: str) -> float | None:
        """Return the limit of a value; None until there are enough good steps."""
        logarithms = self._windows.get(name, ())
        if len(logarithms) < self._section.min_steps:
            return None
        values = list(logarithms)
        now = statistics.median(values[-math.ceil(LATEST * len(values)) :])
        change = statistics.median(abs(after - before) for before, after in itertools.pairwise(values))
        # The difference of two values has a spread larger by sqrt(2) than each value.
        spread = TO_STANDARD_DEVIATION * change / math.sqrt(2)
        least = LEAST_DEVIATION_OF_NORMS if name == GRAD_NORM else LEAST_DEVIATION
        return math.exp(now + self._section.deviations * max(spread, least))

    def accept(self, values: Mapping[str, float]) -> None:
        """Add a good step's values to the baseline."""
        for name, value in values.items():
            if value > 0:
                # Logarithms: norms vary by factors, and the ratio of a loss to its median is what matters.
                self._window(name).append(math.log(value))

    def forget(self) -> None:
        """Clear the baseline; bad steps stay counted."""
        self._windows.clear()

    def _window(self, name: str) -> deque[float]:
        return self._windows.setdefault(name, deque(maxlen=self._section.window_steps))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as small JSON for the checkpoint."""
        windows = {name: list(window) for name, window in self._windows.items()}
        return {"bad": [int(bad) for bad in self._bad], "windows": windows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the baseline. The count of bad steps continues if there is one, as after a rollback."""
        if not self._bad:
            self._bad.extend(bool(bad) for bad in state["bad"])
        self.forget()
        for name, logarithms in state["windows"].items():
            self._window(name).extend(logarithms)
