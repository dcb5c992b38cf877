"""The error classes: one-line messages, each class with its own exit code."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.base import errors
from z2all_ds.base.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, DataError, Z2allError

FAMILY = Z2allError.__subclasses__()


def test_each_error_class_has_its_exit_code() -> None:
    ours = [kind for kind in FAMILY if kind.__module__ == errors.__name__]
    assert {kind.__name__: kind.exit_code for kind in ours} == {
        "ConfigError": 2,
        "DataError": 3,
        "CheckpointError": 4,
        "ClusterError": 5,
        "MachineError": 6,
        "ExportError": 7,
        "TrainingError": 8,
    }
    assert (EXIT_OK, EXIT_BUG, EXIT_INTERRUPTED) == (0, 1, 130)
    assert Z2allError.exit_code == EXIT_BUG


@pytest.mark.parametrize("kind", FAMILY)
def test_a_message_consists_of_value_rule_and_fix(kind: type[Z2allError]) -> None:
    error = kind("train.steps=0", "must be positive.", "Give a larger one.")
    assert str(error) == "train.steps=0: must be positive. Give a larger one."
    assert (error.what, error.rule, error.fix) == ("train.steps=0", "must be positive.", "Give a larger one.")


@given(st.text(), st.text(), st.text())
def test_a_message_is_one_line_for_any_text(what: str, rule: str, fix: str) -> None:
    assert len(str(Z2allError(what, rule, fix)).splitlines()) == 1


def test_an_error_survives_pickling() -> None:
    before = DataError("x.jsonl:3", "not JSON", "Repair it.")
    after = pickle.loads(pickle.dumps(before))
    assert (type(after), after.what, after.rule, after.fix, str(after)) == (
        DataError,
        "x.jsonl:3",
        "not JSON",
        "Repair it.",
        str(before),
    )
