"""Detects bad steps by their loss, the loss of each domain and the gradient norm.

A value is an outlier if it exceeds the median of the latest good steps by more than the configured number of
deviations. The deviation is derived from the median change between neighbouring steps of a longer window, so that a
steeply falling loss does not look like a noisy one; medians are not affected by a few extreme values. Non-finite values
are always outliers. Only good steps are remembered, so a few bad steps do not become the baseline. Many bad steps are a
new level: the baseline is cleared and learned again. A domain's loss in a step with few of its tokens is a noisy mean,
so its limit is wider there, and the limit of the whole loss is higher in a step with more tokens of a domain whose loss
is high: a rare domain would be skipped for ever. Plain numbers, no torch: every rank reaches the same verdict from the
same numbers.
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from z2all_ds.base.config.sections import GuardSection
from z2all_ds.track.fields import LOSS_PREFIX

LOSS, GRAD_NORM = "loss", "grad_norm"
NO_TOKENS: Mapping[str, int] = {}
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

    @property
    def is_of_domain(self) -> bool:
        return self.name.startswith(LOSS_PREFIX)

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g}" + ("" if self.limit is None else f" (limit {self.limit:.4g})")


class SpikeGuard:
    """Checks each step, remembers the good ones and counts the bad ones."""

    def __init__(self, section: GuardSection) -> None:
        self._section = section
        self._windows: dict[str, deque[float]] = {}
        self._tokens: dict[str, deque[float]] = {}
        """Number of tokens behind each value, for domains."""
        self._bad = deque[bool](maxlen=section.window_steps)
        """Which of the latest steps were bad; a rollback to a checkpoint does not reset it."""
        self._steps_to_repeat = 0

    @property
    def bad_steps(self) -> int:
        """Number of bad steps among the latest `window_steps`."""
        return sum(self._bad)

    def count(self, bad: bool) -> bool:
        """Count a step. After too many bad ones clear the baseline, to learn the new level, and return True."""
        if bad or not self._steps_to_repeat:
            self._bad.append(bad)
        self._steps_to_repeat = max(0, self._steps_to_repeat - 1)
        if self.bad_steps <= self._section.bad_steps_allowed:
            return False
        self._bad.clear()
        self.forget()
        return True

    def will_repeat(self, steps: int) -> None:
        """Prepare for a rollback of this many steps. Good ones are not counted again: they would displace the bad
        steps, and a new level would never be learned."""
        self._steps_to_repeat += steps

    def outliers(self, values: Mapping[str, float], tokens: Mapping[str, int] = NO_TOKENS) -> list[Outlier]:
        """Return the outliers among one step's values; without enough good steps, only non-finite values count.

        `tokens`: number of tokens of the step behind a value, by the names of `values`.
        """
        found, of_mixture = [], self._level_of_mixture(values, tokens)
        for name, value in values.items():
            limit = self.limit(name, tokens.get(name), of_mixture if name == LOSS else -math.inf)
            if not math.isfinite(value):
                found.append(Outlier(name, value, None))
            elif limit is not None and value > limit:
                found.append(Outlier(name, value, limit))
        return found

    def _level_of_mixture(self, values: Mapping[str, float], tokens: Mapping[str, int]) -> float:
        """Return the logarithm of the loss that the domains' levels give for their tokens in this step. A domain that
        was not seen before counts with its loss in this step."""
        known = {name: math.exp(_level(self._windows[name])) for name in tokens if self._windows.get(name)}
        expected = sum(count * known.get(name, values[name]) for name, count in tokens.items())
        return math.log(expected / sum(tokens.values())) if 0 < expected < math.inf else -math.inf

    def limit(self, name: str, tokens: int | None = None, least_level: float = -math.inf) -> float | None:
        """Return the limit of a value, the mean over that many tokens; None until there are enough good steps.

        `least_level`: the logarithm of the value to expect, if the level of the latest steps is lower.
        """
        values = list(self._windows.get(name, ()))
        if len(values) < self._section.min_steps:
            return None
        now = max(_level(values), least_level)
        change = statistics.median(abs(after - before) for before, after in itertools.pairwise(values))
        # The difference of two values has a spread larger by sqrt(2) than each value.
        spread = TO_STANDARD_DEVIATION * change / math.sqrt(2)
        least = LEAST_DEVIATION_OF_NORMS if name == GRAD_NORM else LEAST_DEVIATION
        usual_tokens = statistics.median(self._tokens.get(name, [0]))
        noise = math.sqrt(max(1.0, usual_tokens / tokens)) if tokens else 1.0
        # exp(700) is near the largest float.
        return math.exp(min(700.0, now + self._section.deviations * noise * max(spread, least)))

    def accept(self, values: Mapping[str, float], tokens: Mapping[str, int] = NO_TOKENS) -> None:
        """Add a good step's values to the baseline."""
        for name, value in values.items():
            if value > 0 and math.isfinite(value):
                # Logarithms: norms vary by factors, and the ratio of a loss to its median is what matters.
                self._window(self._windows, name).append(math.log(value))
                if name in tokens:
                    self._window(self._tokens, name).append(tokens[name])

    def forget(self) -> None:
        """Clear the baseline; bad steps stay counted."""
        self._windows.clear()
        self._tokens.clear()

    def _window(self, windows: dict[str, deque[float]], name: str) -> deque[float]:
        return windows.setdefault(name, deque(maxlen=self._section.window_steps))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as small JSON for the checkpoint."""
        windows, tokens = (
            {name: list(window) for name, window in all_windows.items()}
            for all_windows in (self._windows, self._tokens)
        )
        return {"bad": [int(bad) for bad in self._bad], "windows": windows, "tokens": tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the baseline. The count of bad steps continues if there is one, as after a rollback."""
        if not self._bad:
            self._bad.extend(bool(bad) for bad in state["bad"])
        self.forget()
        for name, logarithms in state["windows"].items():
            self._window(self._windows, name).extend(logarithms)
        for name, counts in state.get("tokens", {}).items():  # missing in checkpoints of older versions
            self._window(self._tokens, name).extend(counts)


def _level(logarithms: Collection[float]) -> float:
    """Return the current level of a window."""
    return statistics.median(list(logarithms)[-math.ceil(LATEST * len(logarithms)) :])
