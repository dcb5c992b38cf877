"""Tells a step that went wrong from an ordinary one, by its loss, each domain's loss and the gradient's norm.

A value counts as an outlier when it lies above the median of the latest good steps by more than so many deviations.
The deviation comes from the median change between neighbouring steps of a longer window, so that a loss that falls
steeply is not taken for one that varies much; and medians stay where they are when a few values are wild. A value that
is not finite is an outlier always. Only good steps are remembered, so a long spell of bad ones does not become the
measure. Plain numbers, no torch: every rank comes to the same verdict from the same numbers.
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
"""Times the median distance from the median: the standard deviation, where values are normally distributed."""
LATEST = 0.25
"""Part of the window that says where values lie now."""
LEAST_DEVIATION = 0.01
"""Of logarithms. Values that hardly differ would otherwise make outliers of their next small change."""
LEAST_DEVIATION_OF_NORMS = 0.25
"""The gradient's norm changes by a factor of 2 and 3 in runs that are well, and clipping is there for that."""


@dataclass(frozen=True)
class Outlier:
    """One value that should not be."""

    name: str
    value: float
    limit: float | None
    """What it should have stayed below; None where it is not finite at all."""

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g}" + ("" if self.limit is None else f" (limit {self.limit:.4g})")


class SpikeGuard:
    """Looks at each step, remembers the good ones, counts the bad ones."""

    def __init__(self, section: GuardSection) -> None:
        self._section = section
        self._windows: dict[str, deque[float]] = {}
        self._bad = deque[bool](maxlen=section.window_steps)
        """Of the latest steps, which; going back to a checkpoint does not take it back."""

    @property
    def bad_steps(self) -> int:
        """Among the latest `window_steps`."""
        return sum(self._bad)

    def count(self, bad: bool) -> None:
        self._bad.append(bad)

    def outliers(self, values: Mapping[str, float]) -> list[Outlier]:
        """Of one step's figures, by name; those without enough steps behind them are only asked to be finite."""
        found = []
        for name, value in values.items():
            limit = self.limit(name)
            if not math.isfinite(value):
                found.append(Outlier(name, value, None))
            elif limit is not None and value > limit:
                found.append(Outlier(name, value, limit))
        return found

    def limit(self, name: str) -> float | None:
        """None until there are enough good steps to judge by."""
        logarithms = self._windows.get(name, ())
        if len(logarithms) < self._section.min_steps:
            return None
        values = list(logarithms)
        now = statistics.median(values[-math.ceil(LATEST * len(values)) :])
        change = statistics.median(abs(after - before) for before, after in itertools.pairwise(values))
        # Two values of one spread differ by the root of 2 more than each does from their mean.
        spread = TO_STANDARD_DEVIATION * change / math.sqrt(2)
        least = LEAST_DEVIATION_OF_NORMS if name == GRAD_NORM else LEAST_DEVIATION
        return math.exp(now + self._section.deviations * max(spread, least))

    def accept(self, values: Mapping[str, float]) -> None:
        """Adds a good step's figures to the measure."""
        for name, value in values.items():
            if value > 0:
                # Logarithms: norms are spread over factors, and a loss's ratio to its median is what matters too.
                self._window(name).append(math.log(value))

    def forget(self) -> None:
        """What is usual; bad steps stay counted."""
        self._windows.clear()

    def _window(self, name: str) -> deque[float]:
        return self._windows.setdefault(name, deque(maxlen=self._section.window_steps))

    def state_dict(self) -> dict[str, Any]:
        """Small JSON for the checkpoint."""
        windows = {name: list(window) for name, window in self._windows.items()}
        return {"bad": [int(bad) for bad in self._bad], "windows": windows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bad steps are counted through: a run that goes back to a checkpoint must not forget why."""
        if not self._bad:
            self._bad.extend(bool(bad) for bad in state["bad"])
        self.forget()
        for name, logarithms in state["windows"].items():
            self._window(name).extend(logarithms)
