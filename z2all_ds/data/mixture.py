"""Which domain a sample comes from: shares met at once, in every batch and in every lane, without dice or counts.

Each sample is of one domain, so a share by tokens is a share by samples. Sample k stands at the point k * step (mod 1)
of a circle, and the shares cut the circle into arcs. Multiples of a number that is hard to approximate by fractions
(the golden ratio is the hardest) fill a circle evenly, so after any number of samples the count of a domain is off by
two or so. A lane sees every L-th sample; the step is chosen such that L * step is hard to approximate too, or some
lanes would hardly meet some domains, and the documents dealt to them would not be read.

The domain of a sample is computed from its number alone, so a change of the mixture in the middle of a run disturbs
nothing that was before.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, product

import numpy as np
import numpy.typing as npt

from z2all_ds.base.errors import ConfigError
from z2all_ds.data.order import keys

SHARE_UNITS = 10**9
"""Shares are whole numbers of billionths: pow() may differ in its last bit from one C library to the next, and a share
decides the order of the data."""
_CIRCLE = 1 << 64
FREE_QUOTIENTS = 10
"""Steps tried are the 2^10 fractions that begin with so many ones and twos and go on like the golden ratio: each is
hard to approximate, and among them one is so for L times itself as well (its largest quotient was 1 to 6 for ten
numbers of lanes)."""
QUOTIENTS_LOOKED_AT = 14
"""They decide how even up to some 10^6 samples are; what comes after is a share's tenth digit."""
STARTS_TRIED = 32
SAMPLES_LOOKED_AT = 2048
"""Of so many places to begin at, the one whose counts stay nearest to the shares over so many samples: seen over
1,500 random mixtures, the worst count is then off by 2.1 samples there; without the choice, by 3.3."""


def resolve_shares(
    weights: Mapping[str, float] | None, temperature: float, bytes_by_domain: Mapping[str, int]
) -> dict[str, float]:
    """The share of tokens of each domain, by sorted name, in whole billionths that sum to 1.

    With `weights`, the domains named there are read and no others. Without, all are read and a share is proportional
    to size ** (1 / temperature): 1 keeps the sizes, more lifts small domains, infinity makes all equal.
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
            rule = "a temperature shapes shares by size and would be ignored beside weights"
            raise ConfigError(f"temperature={temperature}", rule, "Give weights or a temperature, not both.")
        parts = _checked_weights(weights, bytes_by_domain, known)
    total = math.fsum(parts.values())
    units = {name: max(round(parts[name] / total * SHARE_UNITS), 1) for name in sorted(parts)}
    largest = max(units, key=lambda name: units[name])
    units[largest] += SHARE_UNITS - sum(units.values())  # a few billionths of rounding
    return {name: count / SHARE_UNITS for name, count in units.items()}


def _checked_weights(weights: Mapping[str, float], bytes_by_domain: Mapping[str, int], known: str) -> dict[str, float]:
    if not weights:
        raise ConfigError("weights={}", "at least one domain needs a weight", f"Name some of: {known}; or give none.")
    for name, weight in weights.items():
        if name not in bytes_by_domain:
            raise ConfigError(f"weights: domain {name!r}", "the corpus has no such domain", f"It has: {known}.")
        if not (math.isfinite(weight) and weight > 0):
            fix = "Leave a domain out to read nothing of it."
            raise ConfigError(f"weights: {name}={weight}", "a weight must be a number above 0", fix)
    return {name: float(weight) for name, weight in weights.items()}


@dataclass(frozen=True)
class Mixture:
    """The domain of every sample of a stage; a pure function of these values and the sample's number."""

    shares: tuple[float, ...]
    """Of each domain of the stream, summing to 1; 0 for one that is not read."""
    num_lanes: int
    seed: int
    first_sample: int = 0
    """The stage begins with this global sample."""

    def domain_of(self, sample: int) -> int:
        """Number of the domain that the global sample `sample` comes from."""
        point = ((sample - self.first_sample) * self._step + self._start) % _CIRCLE
        return self._read[bisect_right(self._bounds, point)]

    def _arcs(self, numbers: npt.NDArray[np.uint64], start: int) -> npt.NDArray[np.intp]:
        points = numbers * np.uint64(self._step) + np.uint64(start)  # uint64 wraps around as the circle does
        return np.searchsorted(np.array(self._bounds, dtype=np.uint64), points, side="right")

    @cached_property
    def _read(self) -> list[int]:
        """The domains that have a share."""
        return [number for number, share in enumerate(self.shares) if share > 0]

    @cached_property
    def _bounds(self) -> list[int]:
        """Where the arc of each domain that is read ends; the last takes the rest of the circle."""
        ends = list(accumulate(round(self.shares[number] * SHARE_UNITS) for number in self._read))
        assert ends[-1] == SHARE_UNITS, self.shares
        return [_CIRCLE * end // SHARE_UNITS for end in ends[:-1]]

    @cached_property
    def _step(self) -> int:
        return even_step(self.num_lanes)

    @cached_property
    def _start(self) -> int:
        numbers = np.arange(SAMPLES_LOOKED_AT, dtype=np.uint64)
        asked = np.array([self.shares[number] for number in self._read])
        wanted = np.arange(1, SAMPLES_LOOKED_AT + 1)[:, None] * asked  # [samples, domains]

        def worst_error(start: int) -> float:
            drawn = np.eye(len(asked), dtype=np.int64)[self._arcs(numbers, start)].cumsum(axis=0)
            return float(np.abs(drawn - wanted).max())

        return min((keys(f"mixture|{self.seed}|{number}", 1)[0] for number in range(STARTS_TRIED)), key=worst_error)


@lru_cache(maxsize=64)
def even_step(num_lanes: int) -> int:
    """A step around the circle that fills it evenly, for all samples and for those of each lane."""
    return min(_hard_fractions(), key=lambda step: _unevenness(step * num_lanes % _CIRCLE))


@lru_cache(maxsize=1)
def _hard_fractions() -> list[int]:
    """Parts of the circle, in its units."""
    whole, part = 1, 1
    while whole < _CIRCLE:
        whole, part = whole + part, whole  # neighbours of Fibonacci's row: part / whole is the golden ratio
    steps = []
    for quotients in product((1, 2), repeat=FREE_QUOTIENTS):
        numerator, denominator = part, whole
        for quotient in quotients:
            numerator, denominator = denominator, quotient * denominator + numerator
        steps.append(_CIRCLE * numerator // denominator)
    return steps


def _unevenness(step: int) -> int:
    """The largest of the first quotients of step / circle as a continued fraction; 1 for the golden ratio."""
    largest, whole, part = 0, _CIRCLE, step
    for _ in range(QUOTIENTS_LOOKED_AT):
        if part == 0:
            break
        quotient, rest = divmod(whole, part)
        largest, whole, part = max(largest, quotient), part, rest
    return largest
