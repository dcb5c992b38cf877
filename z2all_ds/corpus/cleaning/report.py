"""The cleaning report: what each rule did, in records, bytes and a few examples; workers make it, the build adds up.

Bytes are UTF-8 bytes of title, content and desc together, and they add up:
bytes_in - all bytes_removed - all bytes_dropped = bytes_out; records likewise.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

SAMPLES_PER_RULE = 5
COLUMNS = ("rule", "records changed", "bytes removed", "records dropped", "bytes dropped", "e.g.")


@dataclass
class RuleCount:
    """What one rule did."""

    records_changed: int = 0
    bytes_removed: int = 0
    records_dropped: int = 0
    bytes_dropped: int = 0
    samples: list[str] = field(default_factory=list)
    """The first few: `where: before -> after`, or `where: why it was dropped`."""

    @property
    def wants_sample(self) -> bool:
        return len(self.samples) < SAMPLES_PER_RULE

    def add_sample(self, sample: str) -> None:
        if self.wants_sample:
            self.samples.append(sample)


@dataclass
class CleaningReport:
    """Counts of a build, or of the part of it that one worker cleaned."""

    records_in: int = 0
    bytes_in: int = 0
    records_out: int = 0
    bytes_out: int = 0
    rules: dict[str, RuleCount] = field(default_factory=dict)
    """By name, in the order of the steps; a rule that was on and did nothing is here with zeros."""
    not_applied_to_code: list[str] = field(default_factory=list)
    """Altering rules that were asked for and left out, because code is never altered."""

    def rule(self, name: str) -> RuleCount:
        return self.rules.setdefault(name, RuleCount())

    def merge(self, other: "CleaningReport") -> None:
        """Adds what another worker counted; its samples come after ours."""
        for name in ("records_in", "bytes_in", "records_out", "bytes_out"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, theirs in other.rules.items():
            ours = self.rule(name)
            for counter in ("records_changed", "bytes_removed", "records_dropped", "bytes_dropped"):
                setattr(ours, counter, getattr(ours, counter) + getattr(theirs, counter))
            for sample in theirs.samples:
                ours.add_sample(sample)
        self.not_applied_to_code += [name for name in other.not_applied_to_code if name not in self.not_applied_to_code]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "CleaningReport":
        return cls(**{**values, "rules": {name: RuleCount(**counts) for name, counts in values["rules"].items()}})

    def rows(self) -> list[tuple[str, ...]]:
        """A table under COLUMNS: a row a rule, the rules that code was spared, and the total."""
        rows = []
        for name, count in self.rules.items():
            numbers = (count.records_changed, count.bytes_removed, count.records_dropped, count.bytes_dropped)
            rows.append((name, *(f"{number:,}" if number else "-" for number in numbers), *count.samples[:1]))
        rows += [(name, *"----", "not applied: code is never altered") for name in self.not_applied_to_code]
        kept = (
            f"{self.records_out:,} of {self.records_in:,} records, {self.bytes_out:,} of {self.bytes_in:,} bytes kept"
        )
        rows.append(("total", *"----", kept))
        return [(*row, *[""] * (len(COLUMNS) - len(row))) for row in rows]


def visible(text: str) -> str:
    """The text with everything that is not seen (controls, joiners, odd blanks, line breaks) as an escape."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
