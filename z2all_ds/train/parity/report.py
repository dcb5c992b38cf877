"""Prints a comparison as tables or as JSON."""

from typing import Any

from z2all_ds.base.reports import Shown, Table
from z2all_ds.train.parity.compare import TOLERANCES, Comparison, JsonOutcome, largest

REFERENCE = "plain torch"
DIGITS = {"fp32": 7, "bf16": 5}
"""Decimal places: as many as tell apart what the tolerance allows."""


def describe(comparison: Comparison) -> Shown:
    """Yield a table of losses, one of gradient norms, and a line for each JSON."""
    allowed = TOLERANCES[comparison.precision]
    yield (
        f"{comparison.precision}, ranks: {comparison.ranks}; allowed relative difference:"
        f" loss {allowed.loss:.0e}, grad norm {allowed.first_grad_norm:.0e} in the first step,"
        f" {allowed.grad_norm:.0e} afterwards"
    )
    for quantity in ("loss", "grad_norm"):
        yield ""
        yield _values(comparison, quantity)
    width = max(len(outcome.name) for outcome in comparison.outcomes)
    yield ""
    for outcome in comparison.outcomes:
        verdict = "within" if comparison.is_within(outcome) else "BEYOND"
        parts = [f"{outcome.name:{width}}", verdict, *(_largest(comparison, outcome, q) for q in ("loss", "grad_norm"))]
        if outcome.dtypes:
            parts.append(", ".join(f"{what} {dtype}" for what, dtype in outcome.dtypes.items()))
        yield " | ".join(parts)


def _values(comparison: Comparison, quantity: str) -> Table:
    rows = []
    for values in zip(comparison.reference, *(outcome.values for outcome in comparison.outcomes), strict=True):
        found = [getattr(one, quantity) for one in values]
        cells = ["-" if value is None else f"{value:.{DIGITS[comparison.precision]}f}" for value in found]
        rows.append([f"step {values[0].step:4}", *cells])
    names = (outcome.name for outcome in comparison.outcomes)
    return Table((quantity.replace("_", " "), REFERENCE, *names), rows, "r")


def _largest(comparison: Comparison, outcome: JsonOutcome, quantity: str) -> str:
    label = quantity.replace("_", " ")
    found = largest(comparison.differences(outcome), quantity)
    return f"{label} unknown" if found is None else f"{label} off by {found.relative:.1e} (step {found.step})"


def content_of(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison for JSON."""
    return {
        "precision": comparison.precision,
        "ranks": comparison.ranks,
        "allowed": TOLERANCES[comparison.precision],
        "reference": comparison.reference,
        "jsons": [_outcome(comparison, outcome) for outcome in comparison.outcomes],
    }


def _outcome(comparison: Comparison, outcome: JsonOutcome) -> dict[str, Any]:
    found = comparison.differences(outcome)
    worst = {quantity: largest(found, quantity) for quantity in ("loss", "grad_norm")}
    return {
        "name": outcome.name,
        "within": comparison.is_within(outcome),
        **{f"largest_{quantity}_difference": one and one.relative for quantity, one in worst.items()},
        "dtypes": outcome.dtypes,
        "steps": outcome.values,
    }
