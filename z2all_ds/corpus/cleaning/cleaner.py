"""The cleaner: applies the steps that need one document. Its report counts their effects; the build merges all reports.

Altering steps change title, content and desc; dropping steps look at the content. Code is never altered, because
control characters and runs of punctuation may be significant in a program; the report lists the skipped steps.

Cleaning is idempotent: cleaning a cleaned document with the same rules neither changes nor drops it.

Bytes in a report are UTF-8 bytes of title, content and desc together:
bytes_in - all bytes_removed - all bytes_dropped = bytes_out; records likewise.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from z2all_ds.corpus.cleaning import text_rules
from z2all_ds.corpus.cleaning.drop_rules import why_garbled, why_symbols, why_too_long, why_too_short
from z2all_ds.corpus.cleaning.rules import ALTERING, CleaningRules
from z2all_ds.corpus.draft import Draft

SAMPLES_PER_RULE = 5
EMPTIED = "emptied"
"""Counts, like a rule, documents that the altering steps left empty."""
_TITLE_CHARS = 80
_CHARS_BEFORE_CHANGE, _CHARS_AFTER_CHANGE = 12, 28

Alter = Callable[[str], str]
WhyDrop = Callable[[str], str]


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
        """Add another worker's counts; its samples come after ours."""
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


class Cleaner:
    """Cleans drafts one by one; one per worker and source."""

    def __init__(self, rules: CleaningRules, is_code: bool) -> None:
        self.report = CleaningReport()
        steps = rules.steps_on
        if is_code:
            self.report.not_applied_to_code = [name for name in steps if name in ALTERING]
            steps = [name for name in steps if name not in ALTERING]
        for name in steps:  # includes duplicates, which are counted later
            self.report.rule(name)
        self._alter: list[tuple[str, Alter]] = [(name, getattr(text_rules, name)) for name in steps if name in ALTERING]
        self._drop_before: list[tuple[str, WhyDrop]] = []
        self._drop_after: list[tuple[str, WhyDrop]] = []
        min_chars, max_chars, symbol_share = rules.min_chars, rules.max_chars, rules.max_symbol_share
        if rules.garbled:
            self._drop_before.append(("garbled", lambda text: why_garbled(text, is_code)))
        if min_chars:
            self._drop_after.append(("min_chars", lambda text: why_too_short(text, min_chars)))
        if max_chars is not None:
            self._drop_after.append(("max_chars", lambda text: why_too_long(text, max_chars)))
        if symbol_share is not None:
            self._drop_after.append(("max_symbol_share", lambda text: why_symbols(text, symbol_share, is_code)))

    def clean(self, draft: Draft) -> Draft | None:
        """Return the cleaned draft (the same object if unchanged), or None if it is dropped."""
        report, size = self.report, num_bytes(draft)
        report.records_in += 1
        report.bytes_in += size
        if self._is_dropped(draft, self._drop_before, size):
            return None
        cleaned = draft
        for name, alter in self._alter:
            cleaned, size = self._altered(name, alter, cleaned, size)
        if cleaned is not draft:
            if not cleaned.content.strip():
                self._count_drop(EMPTIED, cleaned, "nothing left", size)
                return None
            # Again: if much was removed, the rest may be the garbled part.
            if self._is_dropped(cleaned, self._drop_before, size):
                return None
        if self._is_dropped(cleaned, self._drop_after, size):
            return None
        report.records_out += 1
        report.bytes_out += size
        return cleaned

    def _altered(self, name: str, alter: Alter, draft: Draft, size: int) -> tuple[Draft, int]:
        title, content, desc = alter(draft.title), alter(draft.content), alter(draft.desc)
        if title is draft.title and content is draft.content and desc is draft.desc:
            return draft, size
        cleaned = Draft(title, content, draft.category, desc, draft.others)
        cleaned_size = num_bytes(cleaned)
        count = self.report.rule(name)
        count.records_changed += 1
        count.bytes_removed += size - cleaned_size
        if count.wants_sample:
            pairs = ((draft.content, content), (draft.title, title), (draft.desc, desc))
            change = first_change(*next(pair for pair in pairs if pair[0] is not pair[1]))
            count.samples.append(f"{_title(draft)}: {change}")
        return cleaned, cleaned_size

    def _is_dropped(self, draft: Draft, why_by_rule: list[tuple[str, WhyDrop]], size: int) -> bool:
        for name, why in why_by_rule:
            if reason := why(draft.content):
                self._count_drop(name, draft, reason, size)
                return True
        return False

    def _count_drop(self, rule: str, draft: Draft, reason: str, size: int) -> None:
        count = self.report.rule(rule)
        count.records_dropped += 1
        count.bytes_dropped += size
        if count.wants_sample:
            count.samples.append(f"{_title(draft)}: {reason}")


def num_bytes(draft: Draft) -> int:
    """Return the UTF-8 bytes of title, content and desc."""
    return sum(
        len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        for text in (draft.title, draft.content, draft.desc)
    )


def _title(draft: Draft) -> str:
    """Return the title of a document, or its first words."""
    return visible((draft.title or draft.content.lstrip())[:_TITLE_CHARS])


def first_change(before: str, after: str) -> str:
    """Return `before -> after` around the first difference, with escapes for invisible characters."""
    shorter = min(len(before), len(after))
    start = next((at for at in range(shorter) if before[at] != after[at]), shorter)
    cut = slice(max(0, start - _CHARS_BEFORE_CHANGE), start + _CHARS_AFTER_CHANGE)
    return f"{visible(before[cut])} -> {visible(after[cut])}"


def visible(text: str) -> str:
    """Return the text with an escape for each invisible character (controls, joiners, line breaks)."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
