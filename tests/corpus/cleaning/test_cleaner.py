"""Tests of the cleaner: exact counts, unchanged code, consistent reports, and idempotence."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.cleaning.test_text_rules import runs, texts
from z2all_ds.corpus.cleaning import Cleaner, CleaningReport, CleaningRules
from z2all_ds.corpus.cleaning.cleaner import EMPTIED, SAMPLES_PER_RULE, first_change, num_bytes
from z2all_ds.corpus.draft import Draft

ALL = CleaningRules.parse(["all"])
DIRTY_CODE = "if a :\r\n\tprint('。。。。。。')  # 中 文 \u200b\x0c!!!!!!\n" * 2


def test_without_rules_documents_are_not_changed() -> None:
    cleaner, draft = Cleaner(CleaningRules(), is_code=False), Draft("t", "中 文\u200b!!!!!", desc="\x07")
    assert cleaner.clean(draft) is draft
    assert cleaner.report.rules == {} and cleaner.report.records_out == 1
    assert cleaner.report.bytes_in == cleaner.report.bytes_out == num_bytes(draft) == 17


def test_altering_rules_count_exactly_and_keep_other_fields() -> None:
    cleaner = Cleaner(CleaningRules.parse(["control_characters", "repeated_punctuation"]), is_code=False)
    others = {"url": "x\x00"}
    cleaned = cleaner.clean(Draft("标\u200b题", "好！！！！！的\r\n", "c\x00", "说\x07明", others))
    assert cleaned == Draft("标题", "好！！！的\n", "c\x00", "说明", others)
    control, repeated = cleaner.report.rule("control_characters"), cleaner.report.rule("repeated_punctuation")
    assert (control.records_changed, control.bytes_removed) == (1, 3 + 1 + 1)
    assert (repeated.records_changed, repeated.bytes_removed) == (1, 6)
    assert control.samples == [r"标\u200b题: 好！！！！！的\r\n -> 好！！！！！的\n"]
    assert repeated.samples == ["标题: 好！！！！！的\\n -> 好！！！的\\n"]


def test_dropping_rules_count_exactly() -> None:
    cleaner = Cleaner(CleaningRules(min_chars=3, max_chars=6, max_symbol_share=0.5, garbled=True), is_code=False)
    kept = [text for text in ("一二", "一二三", "1234567", "★★★☆", "Ã©Ã©Ã©") if cleaner.clean(Draft("", text))]
    assert kept == ["一二三"]
    dropped = {name: (one.records_dropped, one.bytes_dropped) for name, one in cleaner.report.rules.items()}
    assert dropped == {"garbled": (1, 12), "min_chars": (1, 6), "max_chars": (1, 7), "max_symbol_share": (1, 12)}
    assert cleaner.report.rule("min_chars").samples == ["一二: 2 characters, fewer than 3"]
    assert (cleaner.report.records_in, cleaner.report.records_out, cleaner.report.bytes_out) == (5, 1, 9)


def test_the_minimum_length_applies_to_the_cleaned_text() -> None:
    cleaner = Cleaner(CleaningRules(control_characters=True, min_chars=4), is_code=False)
    assert cleaner.clean(Draft("", "ab\u200b\u200b\u200b")) is None
    assert cleaner.report.rule("min_chars").bytes_dropped == 2
    assert cleaner.report.rule("control_characters").bytes_removed == 9


def test_a_document_without_visible_characters_is_dropped() -> None:
    cleaner = Cleaner(CleaningRules(control_characters=True), is_code=False)
    assert cleaner.clean(Draft("title", "\u200b\x00\n")) is None
    assert cleaner.report.rule(EMPTIED).records_dropped == 1


def test_garbled_text_is_detected_before_control_characters_are_removed() -> None:
    text = "他们都很好的样子".encode().decode("latin-1")
    cleaner = Cleaner(ALL, is_code=False)
    assert cleaner.clean(Draft("", text * 5)) is None
    assert cleaner.report.rule("garbled").records_dropped == 1
    assert cleaner.report.rule("control_characters").records_changed == 0


def test_code_is_never_changed_but_may_be_dropped() -> None:
    cleaner, draft = Cleaner(ALL, is_code=True), Draft("a\u200b.py", DIRTY_CODE, desc="!!!!!")
    assert cleaner.clean(draft) is draft
    assert draft == Draft("a\u200b.py", DIRTY_CODE, desc="!!!!!")
    assert cleaner.report.not_applied_to_code == ["control_characters", "space_before_cjk", "repeated_punctuation"]
    assert not set(cleaner.report.rules) & set(cleaner.report.not_applied_to_code)
    assert cleaner.clean(Draft("", "x = 1")) is None  # dropping rules apply to code too


@settings(max_examples=80, deadline=None)
@given(st.lists(st.builds(Draft, texts, st.one_of(texts, runs), desc=texts), max_size=4))
def test_any_code_is_either_dropped_or_kept_unchanged(drafts: list[Draft]) -> None:
    cleaner = Cleaner(ALL, is_code=True)
    for draft in drafts:
        before = (draft.title, draft.content, draft.desc)
        assert cleaner.clean(draft) in (None, draft)
        assert (draft.title, draft.content, draft.desc) == before


@settings(max_examples=150, deadline=None)
@given(st.lists(st.builds(Draft, texts, st.one_of(texts, runs), desc=texts), max_size=4), st.integers(0, 5))
def test_the_counts_add_up_and_cleaning_is_idempotent(drafts: list[Draft], min_chars: int) -> None:
    rules = CleaningRules.parse(["all", f"min_chars={min_chars}", "max_symbol_share=0.5"])
    cleaner, again = Cleaner(rules, is_code=False), Cleaner(rules, is_code=False)
    cleaned = [one for one in map(cleaner.clean, drafts) if one is not None]
    report = cleaner.report
    assert report.records_in == len(drafts) and report.records_out == len(cleaned)
    assert report.bytes_in == sum(map(num_bytes, drafts)) and report.bytes_out == sum(map(num_bytes, cleaned))
    counts = report.rules.values()
    assert report.bytes_in - sum(one.bytes_removed + one.bytes_dropped for one in counts) == report.bytes_out
    assert report.records_in - sum(one.records_dropped for one in counts) == report.records_out
    assert all(again.clean(one) is one for one in cleaned)


def test_merged_worker_reports_equal_the_report_of_one_cleaner() -> None:
    rules = CleaningRules.parse(["control_characters", "min_chars=3"])
    drafts = [Draft(f"t{i}", ("a\x00" if i % 2 else "abc\x07") + "x" * (i % 3)) for i in range(40)]
    whole, parts = Cleaner(rules, is_code=False), [Cleaner(rules, is_code=False) for _ in range(3)]
    for number, draft in enumerate(drafts):
        whole.clean(draft)
        parts[number * 3 // len(drafts)].clean(draft)
    merged = CleaningReport()
    for part in parts:
        merged.merge(CleaningReport.from_json(json.loads(json.dumps(part.report.to_json()))))
    assert merged == whole.report
    assert len(merged.rule("control_characters").samples) == SAMPLES_PER_RULE


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ("ab\x00c", "abc", r"ab\x00c -> abc"),
        ("x" * 50 + "中 文", "x" * 50 + "中文", "x" * 11 + "中 文 -> " + "x" * 11 + "中文"),
        ("!!!!", "!!!", "!!!! -> !!!"),
        ("\ufeff", "", r"\ufeff -> "),
    ],
)
def test_a_sample_shows_the_first_change(before: str, after: str, shown: str) -> None:
    assert first_change(before, after) == shown
