"""The cleaner: takes the steps that see one document at a time, and counts what they do.

Altering steps run on title, content and desc; dropping steps look at the content. Code is never altered: a control
character or a run of signs in a program may be what it is about. What was asked for and left out is in the report.

Cleaning what was cleaned changes nothing and drops nothing, so a corpus may be cleaned again with the same rules.
"""

from collections.abc import Callable

from z2all_ds.corpus.cleaning import text_rules
from z2all_ds.corpus.cleaning.drop_rules import why_garbled, why_symbols, why_too_long, why_too_short
from z2all_ds.corpus.cleaning.report import CleaningReport, visible
from z2all_ds.corpus.cleaning.rules import CleaningRules
from z2all_ds.corpus.draft import Draft

EMPTIED = "emptied"
"""Counts, like a rule, documents of which the altering steps left nothing."""
_CHARS_OF_PLACE = 80
_CHARS_BEFORE_CHANGE, _CHARS_AFTER_CHANGE = 12, 28

Alter = Callable[[str], str]
WhyDrop = Callable[[str], str]


class Cleaner:
    """Cleans drafts one by one; one per worker and source."""

    def __init__(self, rules: CleaningRules, is_code: bool) -> None:
        self.report = CleaningReport()
        if is_code:
            self.report.not_applied_to_code = rules.altering_steps_on
            rules = rules.without_altering()
        self._alter: list[tuple[str, Alter]] = [(name, getattr(text_rules, name)) for name in rules.altering_steps_on]
        self._drop_before: list[tuple[str, WhyDrop]] = []
        if rules.garbled:
            self._drop_before.append(("garbled", lambda text: why_garbled(text, is_code)))
        self._drop_after = _length_and_symbol_rules(rules, is_code)
        for name in rules.steps_on:  # in the order of the steps; duplicates are counted here later
            self.report.rule(name)

    def clean(self, draft: Draft) -> Draft | None:
        """The cleaned draft (the same object if nothing changed), or None: dropped and counted."""
        report, size = self.report, num_bytes(draft)
        report.records_in += 1
        report.bytes_in += size
        if self._dropped(draft, self._drop_before, size):
            return None
        cleaned = draft
        for name, alter in self._alter:
            cleaned, size = self._altered(name, alter, cleaned, size)
        if cleaned is not draft:
            if not cleaned.content.strip():
                self._count_drop(EMPTIED, cleaned, "nothing left", size)
                return None
            # Once more: where much was taken out, what is left may be the garbled part.
            if self._dropped(cleaned, self._drop_before, size):
                return None
        if self._dropped(cleaned, self._drop_after, size):
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
            count.add_sample(f"{place(draft)}: {first_change(*next(pair for pair in pairs if pair[0] is not pair[1]))}")
        return cleaned, cleaned_size

    def _dropped(self, draft: Draft, why_by_rule: list[tuple[str, WhyDrop]], size: int) -> bool:
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
            count.add_sample(f"{place(draft)}: {reason}")


def _length_and_symbol_rules(rules: CleaningRules, is_code: bool) -> list[tuple[str, WhyDrop]]:
    found: list[tuple[str, WhyDrop]] = []
    least, most, share = rules.min_chars, rules.max_chars, rules.max_symbol_share
    if least:
        found.append(("min_chars", lambda text: why_too_short(text, least)))
    if most is not None:
        found.append(("max_chars", lambda text: why_too_long(text, most)))
    if share is not None:
        found.append(("max_symbol_share", lambda text: why_symbols(text, share, is_code)))
    return found


def num_bytes(draft: Draft) -> int:
    """UTF-8 bytes of what a model or a reader sees of a document."""
    return sum(
        len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        for text in (draft.title, draft.content, draft.desc)
    )


def place(draft: Draft) -> str:
    """A few words by which a person finds the document: its title or how it begins."""
    return visible((draft.title or draft.content.lstrip())[:_CHARS_OF_PLACE])


def first_change(before: str, after: str) -> str:
    """`before -> after` around the first difference, with the invisible made visible."""
    start = _first_difference(before, after)
    cut = slice(max(0, start - _CHARS_BEFORE_CHANGE), start + _CHARS_AFTER_CHANGE)
    return f"{visible(before[cut])} -> {visible(after[cut])}"


def _first_difference(one: str, other: str) -> int:
    """By halving: comparing slices is done in C, comparing characters is not, and texts can have millions."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
