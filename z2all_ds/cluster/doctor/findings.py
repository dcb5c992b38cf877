"""What a check found, and how it is told: as a table with what to do about each, or as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TextIO

OK, WARN, FAIL = "ok", "warn", "fail"
"""`fail`: training cannot work. `warn`: it may fail or be slow later. `ok`: nothing to do."""


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


def to_json(findings: Sequence[Finding]) -> str:
    """For programs: a list of {name, status, value, fix, measured}."""
    return json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False)


def render(findings: Sequence[Finding], file: TextIO | None = None) -> None:
    """Prints a table, what to do about each finding that is not ok, and the counts; to stdout unless told otherwise."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {OK: "green", WARN: "yellow", FAIL: "red"}
    marks = {status: f"[{colour}]{status}[/{colour}]" for status, colour in colours.items()}
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("", "what"):
        table.add_column(column, no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        table.add_row(marks[finding.status], escape(finding.name), escape(finding.value))
    console = Console(file=file, highlight=False)
    console.print(table)
    for finding in findings:
        if finding.fix:
            console.print(f"{marks[finding.status]} {escape(finding.name)}: {escape(finding.fix)}")
    console.print(", ".join(f"{sum(f.status == status for f in findings)} {status}" for status in colours))
