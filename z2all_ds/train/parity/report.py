"""Prints a comparison as a table or as JSON."""

import json
from typing import Any

from z2all_ds.train.parity.compare import TOLERANCES, Comparison, JsonOutcome, largest

REFERENCE = "plain torch"
DIGITS = {"fp32": 7, "bf16": 5}
"""Decimal places: enough to show differences of the size of the tolerance."""


def to_table(comparison: Comparison) -> str:
    """Return a table of losses, a table of gradient norms, and a line for each JSON."""
    allowed = TOLERANCES[comparison.precision]
    lines = [
        f"{comparison.precision}, ranks: {comparison.ranks}; allowed relative difference:"
        f" loss {allowed.loss:.0e}, grad norm {allowed.first_grad_norm:.0e} in the first step,"
        f" {allowed.grad_norm:.0e} afterwards"
    ]
    for quantity in ("loss", "grad_norm"):
        lines += ["", *_columns(comparison, quantity)]
    width = max(len(outcome.name) for outcome in comparison.outcomes)
    lines.append("")
    for outcome in comparison.outcomes:
        verdict = "within" if comparison.is_within(outcome) else "BEYOND"
        parts = [f"{outcome.name:{width}}", verdict, *(_largest(comparison, outcome, q) for q in ("loss", "grad_norm"))]
        if outcome.dtypes:
            parts.append(", ".join(f"{what} {dtype}" for what, dtype in outcome.dtypes.items()))
        lines.append(" | ".join(parts))
    return "\n".join(lines)


def _columns(comparison: Comparison, quantity: str) -> list[str]:
    digits = DIGITS[comparison.precision]
    heads = [REFERENCE, *(outcome.name for outcome in comparison.outcomes)]
    widths = [max(len(head), digits + 4) for head in heads]
    rows = [comparison.reference, *(outcome.values for outcome in comparison.outcomes)]
    label = quantity.replace("_", " ")
    lines = ["  ".join([f"{label:>9}", *(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))])]
    for values in zip(*rows, strict=True):
        cells = [f"step {values[0].step:4}"]
        for one, width in zip(values, widths, strict=True):
            value = getattr(one, quantity)
            cells.append(f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}")
        lines.append("  ".join(cells))
    return lines


def _largest(comparison: Comparison, outcome: JsonOutcome, quantity: str) -> str:
    label = quantity.replace("_", " ")
    found = largest(comparison.differences(outcome), quantity)
    return f"{label} unknown" if found is None else f"{label} off by {found.relative:.1e} (step {found.step})"


def to_json(comparison: Comparison) -> str:
    content: dict[str, Any] = {
        "precision": comparison.precision,
        "ranks": comparison.ranks,
        "allowed": vars(TOLERANCES[comparison.precision]),
        "reference": [vars(one) for one in comparison.reference],
        "jsons": [_outcome(comparison, outcome) for outcome in comparison.outcomes],
    }
    return json.dumps(content, indent=1, ensure_ascii=False)


def _outcome(comparison: Comparison, outcome: JsonOutcome) -> dict[str, Any]:
    found = comparison.differences(outcome)
    worst = {quantity: largest(found, quantity) for quantity in ("loss", "grad_norm")}
    return {
        "name": outcome.name,
        "within": comparison.is_within(outcome),
        **{f"largest_{quantity}_difference": one and one.relative for quantity, one in worst.items()},
        "dtypes": outcome.dtypes,
        "steps": [vars(one) for one in outcome.values],
    }
