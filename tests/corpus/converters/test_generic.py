import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.base.errors import ConfigError
from z2all_ds.corpus.converters import Source, field_map_converter, find_converter, parse_field_map
from z2all_ds.corpus.converters.generic import CONTENT_NAMES, RECORD_FIELDS, generic
from z2all_ds.corpus.draft import Draft, RowRefused


@pytest.mark.parametrize(
    ("row", "draft"),
    [
        ({"text": "一", "title": "甲", "n": 1}, Draft("甲", "一", others={"n": 1})),
        ({"content": "b", "deep": {"x": [None]}}, Draft("", "b", others={"deep": {"x": [None]}})),
        ({"text": "file", "name": "notes"}, Draft("notes", "file")),
        ({"answer": "a", "question": "q", "topic": "t", "description": "d"}, Draft("q", "a", "t", "d")),
        ({"content": "second", "text": "first"}, Draft("", "first", others={"content": "second"})),
        ({"text": "a", "title": None, "category": ["x"]}, Draft("", "a", others={"title": None, "category": ["x"]})),
        ({"text": "a", "title": 12, "desc": 0.5}, Draft("12", "a", "", "0.5")),
        ({"text": ""}, Draft("", "")),
    ],
)
def test_record_fields_are_guessed_from_common_names(row: dict[str, Any], draft: Draft) -> None:
    assert generic(dict(row)) == draft
    for name in ("jsonl", "text"):
        found = find_converter(name)
        assert isinstance(found, Source)
        assert found.convert(dict(row)) == draft


def test_the_generic_converters_declare_their_form() -> None:
    forms = {name: find_converter(name).form for name in ("generic", "jsonl", "text")}
    assert forms == {"generic": "auto", "jsonl": "jsonl", "text": "txt"}


def test_a_row_without_a_usable_content_field_is_refused() -> None:
    with pytest.raises(RowRefused) as caught:
        generic({"headline": "x", "corpus": "y"})
    names = ", ".join(CONTENT_NAMES)
    assert str(caught.value) == (
        f"has none of the fields {names}; the row has headline, corpus; name one with --fields content=NAME"
    )
    with pytest.raises(RowRefused, match="field text is null; the row has text, answer"):
        generic({"text": None, "answer": "a row of the same file has its text elsewhere"})


def test_a_field_map_moves_only_the_named_fields() -> None:
    convert = field_map_converter({"content": "body", "title": "meta.head.line", "desc": "a.b", "category": "kind"})
    row = {
        "body": "正文",
        "title": "not this",
        "meta": {"head": {"line": 7}, "lang": "zh"},
        "a.b": "dotted",
        "a": {"b": 1},
    }
    others = {"title": "not this", "meta": {"head": {}, "lang": "zh"}, "a": {"b": 1}}
    assert convert(row) == Draft("7", "正文", "", "dotted", others)


def test_one_raw_field_may_be_mapped_to_two_record_fields() -> None:
    assert field_map_converter({"content": "t", "title": "t"})({"t": "x", "n": 1}) == Draft("x", "x", others={"n": 1})


def test_a_field_map_can_be_pickled() -> None:
    convert = pickle.loads(pickle.dumps(field_map_converter({"content": "a.b"})))
    assert convert({"a": {"b": "x"}}) == Draft("", "x", others={"a": {}})


@pytest.mark.parametrize("row", [{}, {"a": 1}, {"a": "b"}, {"a": {"c": "x"}}, {"b": "x"}])
def test_a_row_without_the_mapped_content_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(RowRefused, match=r"^field a\.b is missing; the row has "):
        field_map_converter({"content": "a.b"})(row)


def test_mapped_values_that_are_not_text_are_refused() -> None:
    with pytest.raises(RowRefused, match=r"^field a is null; the row has a$"):
        field_map_converter({"content": "a"})({"a": None})
    convert = field_map_converter({"content": "a", "title": "m.t"})
    assert convert({"a": "x", "m": {"t": None}}) == Draft("", "x", others={"m": {}})
    with pytest.raises(RowRefused, match=r"^field m\.t is a list \(\[1\]\), not text; the row has .*a, m$"):
        convert({"a": "x", "m": {"t": [1]}})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"contents": "x"},
            "record field 'contents': must be one of content, title, category, desc.*Did you mean content?",
        ),
        ({"content": "x", "others": "y"}, "all other fields go to others"),
        ({"title": "x"}, "has no field for the content. Add content=NAME"),
        ({"content": ""}, "has no raw field"),
    ],
)
def test_invalid_field_maps_are_refused(fields: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        field_map_converter(fields)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("content=body,title=subject", {"content": "body", "title": "subject"}),
        (" content = body , title=meta.title", {"content": "body", "title": "meta.title"}),
        ("content=a=b", {"content": "a=b"}),
    ],
)
def test_field_maps_are_parsed_from_the_command_line(text: str, fields: dict[str, str]) -> None:
    assert parse_field_map(text) == fields


@pytest.mark.parametrize("text", ["", "content", "content=", "=body", "content=a,", "content=a,content=b"])
def test_field_maps_that_cannot_be_parsed_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="field map") as caught:
        parse_field_map(text)
    assert "\n" not in str(caught.value)


NAME = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1)


@given(st.dictionaries(st.sampled_from(RECORD_FIELDS), NAME, min_size=1))
def test_any_field_map_can_be_written_and_parsed_back(fields: dict[str, str]) -> None:
    assert parse_field_map(",".join(f"{name}={path}" for name, path in fields.items())) == fields


VALUE = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.lists(st.text(), max_size=2))


@given(st.dictionaries(st.sampled_from(["text", "title", "name", "topic", "desc", "x", "y"]), VALUE))
def test_guessing_loses_no_value_and_refuses_only_rows_without_content(row: dict[str, Any]) -> None:
    try:
        draft = generic(dict(row))
    except RowRefused:
        assert type(row.get("text")) is not str
        return
    assert draft.content == row["text"]
    texts = [draft.title, draft.category, draft.desc]
    for name, value in row.items():
        assert name == "text" or (name in draft.others and draft.others[name] == value) or str(value) in texts
