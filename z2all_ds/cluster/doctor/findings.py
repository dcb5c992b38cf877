"""The finding of a check, and the report of all findings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from z2all_ds.base.reports import Shown, Table

OK, WARN, FAIL = "ok", "warn", "fail"
"""`fail`: training cannot work. `warn`: it may fail or be slow later. `ok`: nothing to do."""
COLOURS = {OK: "green", WARN: "yellow", FAIL: "red"}


@dataclass(frozen=True)
class Finding:
    """The result of one check. `fix` is empty if there is nothing to do."""

    name: str
    status: str
    value: str
    fix: str = ""
    measured: dict[str, float] = field(default_factory=dict, kw_only=True, hash=False)
    """Figures for programs such as the planner; keys have the unit. Mostly empty."""


Check = Callable[[], Finding | list[Finding]]


def has_failures(findings: Sequence[Finding]) -> bool:
    """Return whether training cannot work here."""
    return any(finding.status == FAIL for finding in findings)


def describe(findings: Sequence[Finding]) -> Shown:
    """Yield a table, the fix of each finding that is not ok, and the counts."""
    marks = {status: (status, colour) for status, colour in COLOURS.items()}
    yield Table(("", "what", "found"), [(marks[one.status], one.name, one.value) for one in findings], "l")
    yield ""
    yield Table((), [(marks[one.status], f"{one.name}: {one.fix}") for one in findings if one.fix])
    yield ", ".join(f"{sum(one.status == status for one in findings)} {status}" for status in COLOURS)
