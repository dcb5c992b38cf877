"""The cleaning report: effects of each rule in records and bytes, with a few examples. The build merges all workers'.

Bytes are UTF-8 bytes of title, content and desc together:
bytes_in - all bytes_removed - all bytes_dropped = bytes_out; records likewise.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

SAMPLES_PER_RULE = 5


@dataclass
class RuleCount:
    """Effects of one rule."""

    records_changed: int = 0
    bytes_removed: int = 0
    records_dropped: int = 0
    bytes_dropped: int = 0
    samples: list[str] = field(default_factory=list)
    """The first few: `document: before -> after`, or `document: reason for dropping it`."""

    @property
    def wants_sample(self) -> bool:
        return len(self.samples) < SAMPLES_PER_RULE


@dataclass
class CleaningReport:
    """Counts of a build, or of one worker's part of it."""

    records_in: int = 0
    bytes_in: int = 0
    records_out: int = 0
    bytes_out: int = 0
    rules: dict[str, RuleCount] = field(default_factory=dict)
    """By name, in the order of the steps; includes active rules without effect."""
    not_applied_to_code: list[str] = field(default_factory=list)
    """Altering rules that were selected but skipped, because code is never altered."""

    def rule(self, name: str) -> RuleCount:
        return self.rules.setdefault(name, RuleCount())

    def merge(self, other: "CleaningReport") -> None:
        """Adds another worker's counts; its samples come after ours."""
        for name in ("records_in", "bytes_in", "records_out", "bytes_out"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, theirs in other.rules.items():
            ours = self.rule(name)
            for counter in ("records_changed", "bytes_removed", "records_dropped", "bytes_dropped"):
                setattr(ours, counter, getattr(ours, counter) + getattr(theirs, counter))
            ours.samples = [*ours.samples, *theirs.samples][:SAMPLES_PER_RULE]
        self.not_applied_to_code += [name for name in other.not_applied_to_code if name not in self.not_applied_to_code]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "CleaningReport":
        return cls(**{**values, "rules": {name: RuleCount(**counts) for name, counts in values["rules"].items()}})


def visible(text: str) -> str:
    """Returns the text with an escape for each invisible character (controls, joiners, line breaks)."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
