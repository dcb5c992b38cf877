"""What a check found, and how people see it: a table, and what to do about each finding."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from z2all_ds.base.reports import Shown, Table

OK, WARN, FAIL = "ok", "warn", "fail"
"""`fail`: training cannot work. `warn`: it may fail or be slow later. `ok`: nothing to do."""
COLOURS = {OK: "green", WARN: "yellow", FAIL: "red"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `fix` is empty when there is nothing to do."""

    name: str
    status: str
    value: str
    fix: str = ""
    measured: dict[str, float] = field(default_factory=dict, kw_only=True, hash=False)
    """Figures for programs, e.g. the planner; the name has the unit. Mostly none."""


def has_failures(findings: Sequence[Finding]) -> bool:
    """Whether training cannot work here."""
    return any(finding.status == FAIL for finding in findings)


def describe(findings: Sequence[Finding]) -> Shown:
    """Yields a table, what to do about each finding that is not ok, and the counts."""
    marks = {status: (status, colour) for status, colour in COLOURS.items()}
    yield Table(("", "what", "found"), [(marks[one.status], one.name, one.value) for one in findings], "l")
    yield ""
    yield Table((), [(marks[one.status], f"{one.name}: {one.fix}") for one in findings if one.fix])
    yield ", ".join(f"{sum(one.status == status for one in findings)} {status}" for status in COLOURS)
