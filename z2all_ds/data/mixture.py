"""The domain of each sample: the shares hold in every batch and in every lane, without random draws or counters.

Each sample is of one domain, so a share of tokens is a share of samples. Sample k is at the point k * step (mod 1) of a
circle, and the shares divide the circle into arcs. Multiples of a number that is hard to approximate by fractions (the
golden ratio is the hardest) fill a circle evenly, so after any number of samples the count of a domain is off by about
two. A lane gets every L-th sample, so the step is chosen such that L * step is hard to approximate too; otherwise some
lanes would rarely get some domains, and would not read the documents assigned to them.

The domain of a sample depends on its number only, so changing the mixture during a run does not affect earlier samples.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, product

import numpy as np

from z2all_ds.base.errors import ConfigError
from z2all_ds.data.order import keys

SHARE_UNITS = 10**9
"""Shares are integers in billionths, because they decide the data order and the last bit of pow() depends on the C
library."""
_CIRCLE = 1 << 64
FREE_QUOTIENTS = 10
"""The candidate steps are the 2^10 continued fractions that begin with ten ones and twos and end like the golden ratio.
Each is hard to approximate, and for at least one of them L times the step is too (its largest quotient was 1 to 6 for
ten numbers of lanes)."""
QUOTIENTS_CHECKED = 14
"""Enough for about 10^6 samples; later quotients change the tenth digit of a share."""
STARTS_TRIED = 32
SAMPLES_CHECKED = 2048
"""The start is the one of 32 whose counts stay closest to the shares over 2048 samples. Over 1,500 random mixtures, the
worst count is then off by 2.1 samples; without this choice, by 3.3."""


def resolve_shares(
    weights: Mapping[str, float] | None, temperature: float, bytes_by_domain: Mapping[str, int]
) -> dict[str, float]:
    """Return the share of tokens per domain, by sorted name, in whole billionths that sum to 1.

    With `weights`, only the domains named there are read. Without, all are read, with shares proportional to
    size ** (1 / temperature): 1 keeps the sizes, a higher value raises small domains, infinity makes all equal.
    """
    known = ", ".join(sorted(bytes_by_domain)) or "none"
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature}", "it must be above 0", "Use 1 for shares by size.")
    if weights is None:
        parts = {name: float(size) ** (1.0 / temperature) for name, size in bytes_by_domain.items() if size > 0}
        if not parts:
            raise ConfigError("weights=None", "no domain of the corpus has any text", f"Its domains: {known}.")
    else:
        if temperature != 1.0:
            rule = "applies to shares by size only, and weights are set"
            raise ConfigError(f"temperature={temperature}", rule, "Set weights or a temperature, not both.")
        parts = _checked_weights(weights, bytes_by_domain, known)
    total = math.fsum(parts.values())
    units = {name: max(round(parts[name] / total * SHARE_UNITS), 1) for name in sorted(parts)}
    largest = max(units, key=lambda name: units[name])
    units[largest] += SHARE_UNITS - sum(units.values())  # a few billionths of rounding
    return {name: count / SHARE_UNITS for name, count in units.items()}


def _checked_weights(weights: Mapping[str, float], bytes_by_domain: Mapping[str, int], known: str) -> dict[str, float]:
    if not weights:
        raise ConfigError(
            "weights={}", "at least one domain needs a weight", f"Use some of {known}, or set no weights."
        )
    for name, weight in weights.items():
        if name not in bytes_by_domain:
            raise ConfigError(f"weights: domain {name!r}", "the corpus has no such domain", f"It has: {known}.")
        if not (math.isfinite(weight) and weight > 0):
            fix = "To exclude a domain, leave it out."
            raise ConfigError(f"weights: {name}={weight}", "a weight must be a number above 0", fix)
    return {name: float(weight) for name, weight in weights.items()}


@dataclass(frozen=True)
class Mixture:
    """The domain of every sample of a stage, a pure function of these values and the sample number."""

    shares: tuple[float, ...]
    """Share of each domain of the stream; 0 for one that is not read. The sum is 1."""
    num_lanes: int
    seed: int
    first_sample: int = 0
    """First global sample of the stage."""

    def domain_of(self, sample: int) -> int:
        """Return the domain index of global sample `sample`."""
        point = ((sample - self.first_sample) * self._step + self._start) % _CIRCLE
        return self._read[bisect_right(self._bounds, point)]

    @cached_property
    def _read(self) -> list[int]:
        """Indices of the domains with a share."""
        return [number for number, share in enumerate(self.shares) if share > 0]

    @cached_property
    def _bounds(self) -> list[int]:
        """End of the arc of each domain in `_read`; the last one gets the rest of the circle."""
        ends = list(accumulate(round(self.shares[number] * SHARE_UNITS) for number in self._read))
        assert ends[-1] == SHARE_UNITS, self.shares
        return [_CIRCLE * end // SHARE_UNITS for end in ends[:-1]]

    @cached_property
    def _step(self) -> int:
        return even_step(self.num_lanes)

    @cached_property
    def _start(self) -> int:
        shares = np.array([self.shares[number] for number in self._read])
        wanted = np.arange(1, SAMPLES_CHECKED + 1)[:, None] * shares  # [samples, domains]
        bounds = np.array(self._bounds, dtype=np.uint64)
        steps = np.arange(SAMPLES_CHECKED, dtype=np.uint64) * np.uint64(self._step)  # uint64 wraps around the circle

        def worst_error(start: int) -> float:
            arcs = np.searchsorted(bounds, steps + np.uint64(start), side="right")
            drawn = np.eye(len(shares), dtype=np.int64)[arcs].cumsum(axis=0)
            return float(np.abs(drawn - wanted).max())

        return min((keys(f"mixture|{self.seed}|{number}", 1)[0] for number in range(STARTS_TRIED)), key=worst_error)


@lru_cache(maxsize=64)
def even_step(num_lanes: int) -> int:
    """Return a step that fills the circle evenly, for all samples and for those of each lane."""
    return min(_hard_fractions(), key=lambda step: _unevenness(step * num_lanes % _CIRCLE))


@lru_cache(maxsize=1)
def _hard_fractions() -> list[int]:
    """Return the candidate steps, in units of the circle."""
    whole, part = 1, 1
    while whole < _CIRCLE:
        whole, part = whole + part, whole  # Fibonacci numbers: part / whole approaches the golden ratio
    steps = []
    for quotients in product((1, 2), repeat=FREE_QUOTIENTS):
        numerator, denominator = part, whole
        for quotient in quotients:
            numerator, denominator = denominator, quotient * denominator + numerator
        steps.append(_CIRCLE * numerator // denominator)
    return steps


def _unevenness(step: int) -> int:
    """Return the largest of the first quotients of the continued fraction of step / circle; 1 for the golden ratio."""
    largest, whole, part = 0, _CIRCLE, step
    for _ in range(QUOTIENTS_CHECKED):
        if part == 0:
            break
        quotient, rest = divmod(whole, part)
        largest, whole, part = max(largest, quotient), part, rest
    return largest
