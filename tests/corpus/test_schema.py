import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.base.errors import DataError
from z2all_ds.corpus.schema import Record, _parse_strictly, parse_record, without_lone_surrogates

GOOD: dict[str, Any] = {"gid": 7, "id": 3, "data_src": "zh", "category": "散文", "title": "雪", "content": "下雪\n了。", "desc": "", "others": {"a": [1]}}  # fmt: skip  # noqa: E501
TEXT = st.text(st.characters(codec="utf-8"))


def test_a_record_is_written_as_one_line_of_unescaped_unicode() -> None:
    line = Record(**GOOD).to_line()
    assert "下雪\\n了。" in line
    assert "\n" not in line
    assert list(json.loads(line)) == ["gid", "id", "data_src", "category", "title", "content", "desc", "others"]


@given(TEXT, TEXT, st.dictionaries(TEXT, st.one_of(st.integers(), TEXT, st.none(), st.lists(TEXT))))
def test_every_record_is_one_line_and_is_parsed_back(title: str, content: str, others: dict) -> None:
    record = Record(1, 2, "d", "c", title, content, "", others)
    line = record.to_line()
    assert len(list(io.StringIO(line))) == 1
    assert parse_record(line, "x") == record
    assert parse_record(line.encode() + b"\n", "x") == record


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gid": "7"}, "gid is a str"),
        ({"gid": True}, "gid is a bool"),
        ({"content": None}, "content is a NoneType"),
        ({"others": []}, "others is a list"),
        ({"extra": 1}, "keys unknown extra"),
        ({"content": "\ud800"}, "half a surrogate pair"),
    ],
)
def test_wrong_values_are_reported_with_their_location(change: dict, words: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_record(json.dumps({**GOOD, **change}), "code-00000.jsonl:17")
    assert str(caught.value).startswith("code-00000.jsonl:17")
    assert words in str(caught.value)


def test_missing_keys_are_listed() -> None:
    with pytest.raises(DataError, match="f:2, keys missing id, desc"):
        parse_record(json.dumps({k: v for k, v in GOOD.items() if k not in ("id", "desc")}), "f:2")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"gid": 1', "f:9: not JSON .* at column 10"),
        (b"", "f:9: not JSON"),
        (b"[1]", "not a list"),
        (b"\xff\xfe", "f:9: not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_invalid_lines_are_refused(line: bytes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        parse_record(line, "f:9")


def test_surrogate_pairs_are_joined_and_halves_replaced() -> None:
    assert without_lone_surrogates("a\ud83d\ude00b\ud800c") == "a😀b\ufffdc"
    assert without_lone_surrogates("plain 中文") == "plain 中文"


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.integers(-(2**70), 2**70)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)
FIELDS = st.sampled_from([*GOOD, "extra"])


def outcome(parse: Callable[[str | bytes, str], Record], line: str | bytes) -> str:
    try:
        return repr(parse(line, "f:1"))
    except DataError as error:
        return str(error)


@given(st.dictionaries(FIELDS, VALUES, max_size=2), st.booleans(), st.booleans())
def test_the_fast_parser_gives_the_same_result_as_the_strict_one(changes: dict, is_ascii: bool, is_cut: bool) -> None:
    """Records are compared by repr, which distinguishes 1 from 1.0 and is equal for NaN."""
    text = json.dumps({**GOOD, **changes}, ensure_ascii=is_ascii)
    text = text[: len(text) // 2] if is_cut else text
    lines: list[str | bytes] = [text, text.encode("utf-8", "surrogatepass")]
    for line in lines:
        assert outcome(parse_record, line) == outcome(_parse_strictly, line)
