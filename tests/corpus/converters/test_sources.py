import json
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from z2all_ds.corpus.converters import Source, find_converter
from z2all_ds.corpus.draft import RowRefused

RAW = Path(__file__).parents[2] / "assets" / "raw"


def json_lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RAW / name).read_text("utf-8").split("\n") if line]


def json_array(name: str) -> list[dict[str, Any]]:
    return json.loads((RAW / name).read_text("utf-8"))


def through_parquet(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON array after writing them to Parquet and reading them back."""
    pq.write_table(pa.Table.from_pylist(json_array(name)), folder / "x.parquet", row_group_size=2)
    return pq.read_table(folder / "x.parquet").to_pylist()


FILES = {
    "baike2018qa": ("jsonl", "baike_qa.json"),
    "news2016zh": ("jsonl", "news2016zh_valid.json"),
    "webtext2019zh": ("jsonl", "web_text_zh_testa.json"),
    "wikipedia_cn": ("jsonl", "wiki_00"),
    "wudao": ("json_array", "part-2021009337.json"),
    "zhihu_kol": ("parquet", "zhihu_kol.rows.json"),
    "wikipedia_en": ("parquet", "wikipedia_en.rows.json"),
    "github_python": ("jsonl", "github_python-000000000000.json"),
}


def rows_of(name: str, folder: Path) -> list[dict[str, Any]]:
    form, file = FILES[name]
    if form == "parquet":
        return through_parquet(file, folder)
    return json_array(file) if form == "json_array" else json_lines(file)


def found(name: str) -> Source:
    source = find_converter(name)
    assert isinstance(source, Source)
    return source


@pytest.mark.parametrize("name", FILES)
def test_every_row_becomes_the_expected_draft(name: str, tmp_path: Path) -> None:
    expected = json_lines(f"expected/{name}.jsonl")
    drafts = [found(name).convert(row) for row in rows_of(name, tmp_path)]
    assert [asdict(draft) for draft in drafts] == expected
    assert len(expected) >= 5


@pytest.mark.parametrize("name", FILES)
def test_no_value_of_a_row_is_lost(name: str, tmp_path: Path) -> None:
    """Every value of a row is in the draft, either under its own name in `others` or as one of the text fields."""
    for row in rows_of(name, tmp_path):
        draft = found(name).convert(dict(row))
        taken = [draft.title, draft.content, draft.category, draft.desc]
        for field, value in row.items():
            if field == "METADATA":
                assert draft.others[field] in (value, json.loads(value) if value and value[1] == '"' else value)
            else:
                assert draft.others.get(field, object()) == value or (value or "") in taken


@pytest.mark.parametrize("name", FILES)
def test_sources_declare_their_form_and_whether_they_are_code(name: str) -> None:
    assert found(name).form == FILES[name][0]
    assert found(name).is_code == (name == "github_python")
    assert pickle.loads(pickle.dumps(found(name))) == found(name)


def test_both_layouts_of_a_wudao_file_contain_the_same_rows() -> None:
    assert json_array("part-2021009337.json") == json_array("part-2021009338.json")


NEEDED = {
    "baike2018qa": ("title", "answer"),
    "news2016zh": ("title", "content"),
    "webtext2019zh": ("title", "content"),
    "wikipedia_cn": ("title", "text"),
    "wudao": ("title", "content"),
    "zhihu_kol": ("INSTRUCTION", "RESPONSE"),
    "wikipedia_en": ("title", "text"),
    "github_python": ("path", "content"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_missing_required_field_is_reported_with_the_available_columns(name: str, tmp_path: Path) -> None:
    for field in NEEDED[name]:
        row = rows_of(name, tmp_path)[0]
        del row[field]
        columns = ", ".join(row)
        with pytest.raises(RowRefused) as caught:
            found(name).convert(row)
        assert str(caught.value) == f"field {field} is missing; the row has {columns}"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "is null;"),
        (["甲", "乙"], "is a list (['甲', '乙']), not text;"),
        ({"a": 1}, "is an object ({'a': 1}), not text;"),
        (True, "is a boolean (True), not text;"),
        (b"raw", "is a bytes (b'raw'), not text;"),
    ],
)
def test_a_required_field_of_the_wrong_type_is_reported_with_its_value(
    name: str, value: Any, words: str, tmp_path: Path
) -> None:
    for field in NEEDED[name]:
        row = rows_of(name, tmp_path)[0] | {field: value}
        with pytest.raises(RowRefused) as caught:
            found(name).convert(row)
        assert str(caught.value).startswith(f"field {field} {words} the row has ")
        assert all(column in str(caught.value) for column in rows_of(name, tmp_path)[0])


@pytest.mark.parametrize("name", FILES)
def test_a_number_is_accepted_as_a_title_but_not_as_content(name: str, tmp_path: Path) -> None:
    title, content = NEEDED[name]
    row = rows_of(name, tmp_path)[0]
    assert found(name).convert(row | {title: 1984}).title == "1984"
    with pytest.raises(RowRefused, match=f"field {content} is a number \\(1984\\), not text"):
        found(name).convert(row | {content: 1984})


@pytest.mark.parametrize(
    ("name", "field", "place"),
    [
        ("baike2018qa", "desc", "desc"),
        ("baike2018qa", "category", "category"),
        ("news2016zh", "desc", "desc"),
        ("webtext2019zh", "topic", "category"),
        ("webtext2019zh", "desc", "desc"),
        ("wudao", "dataType", "category"),
    ],
)
def test_optional_fields_may_be_missing_or_null_or_numbers(name: str, field: str, place: str, tmp_path: Path) -> None:
    row = rows_of(name, tmp_path)[0]
    for value, text in ((None, ""), ("词", "词"), (7, "7"), (0.5, "0.5")):
        draft = found(name).convert(row | {field: value})
        assert (getattr(draft, place), field in draft.others) == (text, False)
    assert getattr(found(name).convert({k: v for k, v in row.items() if k != field}), place) == ""
    with pytest.raises(RowRefused, match=f"field {field} is a list"):
        found(name).convert(row | {field: [1]})


def test_wide_rows_and_long_values_are_shortened_in_errors() -> None:
    wide = {f"column_{n}": n for n in range(100)}
    with pytest.raises(RowRefused, match=r"field text is missing; the row has column_0, .*column_19 and 80 more$"):
        found("wikipedia_cn").convert(wide)
    with pytest.raises(RowRefused, match=r"field text is a list \(\[0, 1, .{30}\.\.\.\), not text"):
        found("wikipedia_cn").convert({"text": list(range(1000)), "title": "x"})
    with pytest.raises(RowRefused, match="the row has no fields"):
        found("wikipedia_cn").convert({})


@pytest.mark.parametrize(
    ("metadata", "kept"),
    [
        ('{"a": [1, null]}', {"a": [1, None]}),
        ('{"a": NaN}', '{"a": NaN}'),  # NaN is not valid in a record
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ("", ""),
        ({"already": "an object"}, {"already": "an object"}),
    ],
)
def test_zhihu_metadata_is_parsed_if_a_record_can_hold_it(metadata: Any, kept: Any) -> None:
    row = {"INSTRUCTION": "问", "RESPONSE": "答", "METADATA": metadata, "extra": None}
    assert found("zhihu_kol").convert(row).others == {"METADATA": kept, "extra": None}
