"""Tests of selecting cleaning steps on the command line, and of invalid values."""

import pytest

from z2all_ds.base.errors import ConfigError
from z2all_ds.corpus.cleaning.rules import EVERY_STEP, CleaningRules


def test_all_steps_are_off_by_default() -> None:
    assert CleaningRules() == CleaningRules.parse([])
    assert CleaningRules().steps_on == []


def test_steps_are_parsed_from_names_and_values() -> None:
    rules = CleaningRules.parse(["control_characters", "min_chars=30", "near_duplicates=0.7", "max_chars=1_000"])
    assert rules == CleaningRules(control_characters=True, min_chars=30, near_duplicates=0.7, max_chars=1000)
    assert rules.steps_on == ["control_characters", "min_chars", "max_chars", "near_duplicates"]


def test_all_turns_on_every_step_and_later_arguments_override_it() -> None:
    rules = CleaningRules.parse(["all"])
    assert rules.to_json() == EVERY_STEP
    assert rules.steps_on == list(EVERY_STEP)
    changed = CleaningRules.parse(["all", "min_chars=5", "near_duplicates=off", "garbled=off"])
    assert (changed.min_chars, changed.near_duplicates, changed.garbled) == (5, None, False)
    assert changed.exact_duplicates


def test_a_name_without_a_value_uses_the_default_value() -> None:
    assert CleaningRules.parse(["min_chars", "near_duplicates"]) == CleaningRules(min_chars=20, near_duplicates=0.8)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("control_caracters", "Did you mean control_characters?"),
        ("min_char=3", "Did you mean min_chars?"),
        ("wash", "must be one of all, garbled, control_characters"),
        ("all=2", "Did you mean all?"),
        ("min_chars=many", "must be an integer"),
        ("min_chars=-1", "integer >= 0"),
        ("max_chars=0", "integer >= 1"),
        ("near_duplicates=1.5", "between 0 and 1"),
        ("near_duplicates=nan", "between 0 and 1"),
        ("near_duplicates=0.1", "0.8 is usual"),
        ("max_symbol_share=-0.1", "between 0 and 1"),
        ("garbled=maybe", "Write garbled or garbled=off."),
    ],
)
def test_invalid_steps_and_values_are_reported_in_one_line(written: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CleaningRules.parse([written])
    assert said in str(caught.value)
    assert written.split("=")[0] in str(caught.value) and "\n" not in str(caught.value)


def test_a_maximum_below_the_minimum_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_chars=10: must not be below min_chars=20"):
        CleaningRules(min_chars=20, max_chars=10)


def test_values_of_the_wrong_type_are_refused() -> None:
    for wrong in ({"garbled": 1}, {"min_chars": True}, {"min_chars": 2.5}, {"near_duplicates": "0.8"}):
        with pytest.raises(ConfigError):
            CleaningRules(**wrong)
