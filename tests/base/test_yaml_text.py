"""YAML that people write: any text gives a value or one BadYaml."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.base.yaml_text import BadYaml, load_yaml

BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1\nb: {c: [x, null, true]}", {"a": 1, "b": {"c": ["x", None, True]}}),
        ("day: 2024-01-31", {"day": "2024-01-31"}),
        ("day: 2024-99-99", {"day": "2024-99-99"}),
        ("", None),
    ],
)
def test_values(text: str, value: object) -> None:
    assert load_yaml(text) == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\na: 2", "a is already given in line 1 in line 2"),
        ("a: &x 1\nb: *x", "aliases are not supported in line 2"),
        (BOMB, "aliases are not supported in line 2"),
        ("[" * 100_000, "nested more than 50 deep in line 1"),
        ("{[a]: 1}", "a key must be a plain value in line 1"),
        ("9" * 5000, "Exceeds the limit"),
        ("!!timestamp x", "groupdict"),
        ("!!int ''", ""),
        ("!!python/object:os.system x", "could not determine a constructor"),
        (b"\xff\xfe\x00", ""),
        ("a: 'b", "while scanning"),
        ("\x00", "special characters are not allowed"),
    ],
)
def test_anything_else_is_one_error(text: str | bytes, problem: str) -> None:
    with pytest.raises(BadYaml) as caught:
        load_yaml(text)
    assert "\n" not in str(caught.value)
    assert problem in str(caught.value) or problem == "while scanning"


@given(st.text(st.sampled_from("ab:-[]{}&*!#|>'\"%@`?, \n\t0123.eE~<="), max_size=40))
def test_no_text_causes_another_error(text: str) -> None:
    with suppress(BadYaml):
        load_yaml(text)
