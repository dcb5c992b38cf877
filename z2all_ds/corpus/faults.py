"""Faults: invalid raw data, counted by kind and located.

Readers and converters report a `Fault`; only the `FaultLog` decides whether the build stops or skips it (`--on-error`).
Harmless faults (a byte order mark, Windows line endings) are counted too and never stop a build.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from z2all_ds.base.errors import ConfigError, DataError

ON_ERROR = ("stop", "skip")
SAMPLES_PER_KIND = 20
MIN_ROWS_TO_CHECK = 1000
"""The share of invalid rows is checked only after this many rows."""

KINDS = {
    "json": "not JSON",
    "not_an_object": "JSON, but not an object",
    "utf8": "not UTF-8",
    "nul": "a NUL byte or character",
    "too_long": "longer than the limit for one record",
    "truncated": "the file is truncated",
    "empty_file": "an empty file",
    "columns": "a field is missing or has the wrong type",
    "empty_text": "a document without text (omitted)",
    "row_group": "a part of a Parquet file that cannot be read",
    "container": "an archive or compressed file that cannot be read",
    "expansion": "a compressed file that expands too much",
    "bom": "a byte order mark (omitted)",
    "line_ends": "Windows line endings (accepted)",
}
HARMLESS = {"bom", "line_ends", "empty_text"}
"""Counted but accepted: real corpora have thousands of rows without an answer."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An error in one row, or in the rest of a file."""

    kind: str
    detail: str


@dataclass
class FaultLog:
    """Fault counts of a domain, or of the part of it that one worker reads."""

    on_error: str = "stop"
    max_bad_share: float = 0.01
    """With `skip`: a larger share of invalid rows indicates a wrong format and stops the build."""
    rows: int = 0
    """Valid and invalid."""
    counts: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[str]] = field(default_factory=dict)
    """The first few of each kind, as `file:line: detail`."""

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise ConfigError(f"--on-error {self.on_error}", f"must be {' or '.join(ON_ERROR)}", "Omit it.")
        if not 0 <= self.max_bad_share <= 1:
            raise ConfigError(f"max_bad_share {self.max_bad_share}", "must be from 0 to 1", "E.g. 0.01.")

    @property
    def bad(self) -> int:
        return sum(count for kind, count in self.counts.items() if kind not in HARMLESS)

    def add(self, fault: Fault, where: Callable[[], str]) -> None:
        """Count a fault, or raise. `where` is called only if needed: a line number may take reading a file."""
        assert fault.kind in KINDS, fault.kind
        if self.on_error == "stop" and fault.kind not in HARMLESS:
            fix = "Repair it, or skip such rows with --on-error skip."
            raise DataError(where(), f"{KINDS[fault.kind]} ({fault.detail})", fix)
        self.counts[fault.kind] = self.counts.get(fault.kind, 0) + 1
        shown = self.samples.setdefault(fault.kind, [])
        if len(shown) < SAMPLES_PER_KIND:
            shown.append(f"{where()}: {fault.detail}")
        if self.rows >= MIN_ROWS_TO_CHECK:
            self.check("so far")

    def check(self, scope: str) -> None:
        """Raise if too many rows are invalid. With `stop` that is any: an earlier build may have skipped some."""
        allowed = self.max_bad_share if self.on_error == "skip" else 0.0
        if self.bad > allowed * max(1, self.rows):
            kinds = ", ".join(f"{n} x {KINDS[kind]}" for kind, n in self.counts.items() if kind not in HARMLESS)
            first = next(iter(next(s for kind, s in self.samples.items() if kind not in HARMLESS)), "")
            rule = f"{kinds}; more than the allowed share of {allowed:g}; the first: {first}"
            fix = "Check these rows and the converter name, or accept them with --on-error skip --max-bad-share."
            raise DataError(f"{self.bad} of {self.rows} rows {scope}", rule, fix)

    def merge(self, other: "FaultLog") -> None:
        """Add the counts of another worker; its samples come after ours."""
        self.rows += other.rows
        for kind, count in other.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count
            samples = self.samples.setdefault(kind, [])
            samples += other.samples.get(kind, [])[: SAMPLES_PER_KIND - len(samples)]

    def to_json(self) -> dict[str, Any]:
        return {"rows": self.rows, "bad": self.bad, "counts": self.counts, "samples": self.samples}
