"""Compares losses and gradient norms of runs with those of the reference. Pure functions, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from z2all_ds.base.errors import TrainingError


@dataclass(frozen=True)
class StepValues:
    """The compared values of one step."""

    step: int
    loss: float
    grad_norm: float | None
    """Before clipping; None if the run does not report it."""


@dataclass(frozen=True)
class Tolerance:
    """Largest relative difference from the reference."""

    loss: float
    first_grad_norm: float
    """For the first step, in which both have the same weights."""
    grad_norm: float
    """For later steps."""

    def of(self, quantity: str, is_first: bool) -> float:
        return float(getattr(self, "first_grad_norm" if is_first and quantity == "grad_norm" else quantity))


TOLERANCES = {"fp32": Tolerance(1e-6, 1e-6, 1e-6), "bf16": Tolerance(2e-3, 2e-3, 2e-2)}
"""fp32: sums in a different order; measured on two CPU ranks over 12 steps: losses differ by 4e-9, norms by 9e-8.

bf16: a gradient is rounded by up to 2e-3 of itself, and one near zero may change its sign; Adam still makes a full step
of it. So norms diverge faster than losses: measured 3e-5 and 2.5e-3 over 12 steps, 2.3e-5 and 6.1e-3 on an H200, 7e-4
and 9e-3 with a learning rate of 0.01 and no clipping; 2e-5 in the first step. A micro-batch that is lost or counted
twice changes a norm by tens of percent.
"""


@dataclass(frozen=True)
class Difference:
    """A difference between a run and the reference."""

    quantity: str
    """`loss` or `grad_norm`."""
    step: int
    value: float
    reference: float
    relative: float
    allowed: float

    @property
    def is_within(self) -> bool:
        return self.relative <= self.allowed  # false for nan


@dataclass(frozen=True)
class JsonOutcome:
    """One DeepSpeed JSON and its results."""

    name: str
    values: tuple[StepValues, ...]
    dtypes: dict[str, Any] | None
    """Data types of computation, accumulation, communication and state, from its run folder."""


@dataclass(frozen=True)
class Comparison:
    """The reference and the outcome of every JSON."""

    precision: str
    ranks: int
    reference: tuple[StepValues, ...]
    outcomes: tuple[JsonOutcome, ...]

    def differences(self, outcome: JsonOutcome) -> list[Difference]:
        return differences(outcome.values, self.reference, TOLERANCES[self.precision])

    def is_within(self, outcome: JsonOutcome) -> bool:
        return all(one.is_within for one in self.differences(outcome))

    def refuse_differences(self) -> None:
        """Raise an error with the first JSON beyond the tolerance, its first such step and both values."""
        beyond = [outcome for outcome in self.outcomes if not self.is_within(outcome)]
        if not beyond:
            return
        first = next(one for one in self.differences(beyond[0]) if not one.is_within)
        others = f" (also beyond it: {', '.join(one.name for one in beyond[1:])})" if beyond[1:] else ""
        raise TrainingError(
            f"{beyond[0].name} at step {first.step}",
            f"its {first.quantity.replace('_', ' ')} {first.value!r} differs by {first.relative:.1e} from the"
            f" {first.reference!r} of plain torch; {self.precision} allows {first.allowed:.0e}{others}",
            "A key of the JSON changes the numbers: compare it with the shipped JSON of its stage.",
        )


def differences(values: Sequence[StepValues], reference: Sequence[StepValues], allowed: Tolerance) -> list[Difference]:
    """Return the differences of all steps and quantities, in the order of steps; unknown norms are left out."""
    assert [one.step for one in values] == [one.step for one in reference], "the steps differ"
    found = []
    for index, (ours, theirs) in enumerate(zip(values, reference, strict=True)):
        for quantity in ("loss", "grad_norm"):
            value, expected = getattr(ours, quantity), getattr(theirs, quantity)
            if value is not None:
                relative = abs(value - expected) / max(abs(expected), 1e-30)
                limit = allowed.of(quantity, is_first=index == 0)
                found.append(Difference(quantity, ours.step, value, expected, relative, limit))
    return found


def largest(found: Sequence[Difference], quantity: str) -> Difference | None:
    """Return the largest difference of one quantity; NaN counts as the largest."""
    of_it = [one for one in found if one.quantity == quantity]
    return max(of_it, key=lambda one: (one.relative != one.relative, one.relative), default=None)
