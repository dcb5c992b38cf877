"""Faults: what is wrong with raw data, counted by kind, located, and either skipped or the end of the build.

A reader or a converter only says what is wrong (`Fault`); the log decides what follows, so `--on-error` is known in
one place. Harmless oddities (a byte order mark, Windows line ends) are counted in the same table and never stop.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from z2all_ds.base.errors import ConfigError, DataError

ON_ERROR = ("stop", "skip")
SAMPLES_PER_KIND = 20
ROWS_BEFORE_JUDGING = 1000
"""A share of bad rows means little among the first few."""

KINDS = {
    "json": "not JSON",
    "not_an_object": "JSON, but not an object",
    "utf8": "not UTF-8",
    "nul": "a NUL byte or character",
    "too_long": "longer than the limit of one record",
    "truncated": "the file ends in the middle",
    "empty_file": "an empty file",
    "columns": "a field is missing or has another type",
    "empty_text": "a document without text (left out)",
    "row_group": "a part of a Parquet file that cannot be read",
    "container": "an archive or compressed file that cannot be read",
    "expansion": "a compressed file that grows too much",
    "bom": "a byte order mark (left out)",
    "line_ends": "Windows line ends (read as usual)",
}
HARMLESS = {"bom", "line_ends", "empty_text"}
"""Counted, and never a reason to stop: real corpora have rows without an answer by the thousand."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong with one row, or with the rest of a file."""

    kind: str
    detail: str


@dataclass
class FaultLog:
    """Counts of a domain, or of the part of it that one worker reads."""

    on_error: str = "stop"
    max_bad_share: float = 0.01
    """Of all rows, under `skip`: more is not dirt but a wrong format, and the build stops."""
    rows: int = 0
    """Good and bad."""
    counts: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[str]] = field(default_factory=dict)
    """The first of each kind: `file:line: what is wrong`."""

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise ConfigError(f"on_error {self.on_error!r}", f"must be one of {', '.join(ON_ERROR)}", "Leave it out.")
        if not 0 <= self.max_bad_share <= 1:
            raise ConfigError(f"max_bad_share {self.max_bad_share}", "must be from 0 to 1", "E.g. 0.01.")

    @property
    def bad(self) -> int:
        return sum(count for kind, count in self.counts.items() if kind not in HARMLESS)

    def add(self, fault: Fault, where: Callable[[], str]) -> None:
        """`where` is asked only for what is shown: finding a line number can mean reading half a file."""
        assert fault.kind in KINDS, fault.kind
        if self.on_error == "stop" and fault.kind not in HARMLESS:
            fix = "Repair it, or leave such rows out with --on-error skip."
            raise DataError(where(), f"{KINDS[fault.kind]} ({fault.detail})", fix)
        self.counts[fault.kind] = self.counts.get(fault.kind, 0) + 1
        shown = self.samples.setdefault(fault.kind, [])
        if len(shown) < SAMPLES_PER_KIND:
            shown.append(f"{where()}: {fault.detail}")
        if self.rows >= ROWS_BEFORE_JUDGING:
            self.judge("so far")

    def judge(self, of_what: str) -> None:
        """Stops when too much was bad. Call it at the end, when all logs are together.

        Under `stop` that is any: a part may come from an earlier try that was told to skip.
        """
        allowed = self.max_bad_share if self.on_error == "skip" else 0.0
        if self.bad > allowed * max(1, self.rows):
            kinds = ", ".join(f"{n} x {KINDS[kind]}" for kind, n in self.counts.items() if kind not in HARMLESS)
            first = next(iter(next(s for kind, s in self.samples.items() if kind not in HARMLESS)), "")
            rule = f"{kinds}; more than the allowed share of {allowed:g}; the first: {first}"
            fix = "Look at those rows and at the source's name; --on-error skip --max-bad-share lets them go."
            raise DataError(f"{self.bad} of {self.rows} rows {of_what}", rule, fix)

    def merge(self, other: "FaultLog") -> None:
        """Adds what another worker counted; its samples come after ours."""
        self.rows += other.rows
        for kind, count in other.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count
            samples = self.samples.setdefault(kind, [])
            samples += other.samples.get(kind, [])[: SAMPLES_PER_KIND - len(samples)]

    def to_json(self) -> dict[str, Any]:
        return {"rows": self.rows, "bad": self.bad, "counts": self.counts, "samples": self.samples}
