"""The record: the one shape of a document between raw text and tokens, and the strict way to read it back.

One record is one line of JSON in UTF-8. A line ends at the line feed: a text may hold U+2028 or U+0085, where Python's
`str.splitlines()` breaks and reading a file line by line does not. Reading is strict on purpose: a shard with a broken
line is named with its line number here, before it becomes a strange loss curve somewhere else.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from z2all_ds.base.errors import DataError


@dataclass(frozen=True)
class Record:
    """One document of the corpus."""

    gid: int
    """Number of the document in the whole corpus; no two documents share one."""
    id: int
    """Number of the document in its source."""
    data_src: str
    """Name of the source; for corpora built here, the domain."""
    category: str
    """What kind of text it is, in a word or two."""
    title: str
    content: str
    """The text itself: what a model is trained on."""
    desc: str
    """Where it came from or what it is, in a sentence."""
    others: dict[str, Any] = field(default_factory=dict)
    """Whatever else a source knows, as plain JSON."""

    def to_line(self) -> str:
        """The record as one line of JSON, without the line end."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


_TYPES: dict[str, type] = {
    "gid": int,
    "id": int,
    "data_src": str,
    "category": str,
    "title": str,
    "content": str,
    "desc": str,
    "others": dict,
}
_RULE = "a record is one JSON object with " + ", ".join(f"{name}:{kind.__name__}" for name, kind in _TYPES.items())
_FIX = "Repair or remove that line and rebuild the corpus; `audit_corpus` lists every broken line."


def parse_record(line: str | bytes, where: str) -> Record:
    """Reads one line; `where` names file and line (`code-00000.jsonl:17`) for the error."""
    # orjson reads more than twice as fast as the standard library (345 against 150 MB/s). What it refuses, or would
    # read otherwise, goes the slow way, which also knows how to say what is wrong.
    try:
        values = orjson.loads(line)
    except orjson.JSONDecodeError:
        return _parse_strictly(line, where)
    if type(values) is dict and values.keys() == _TYPES.keys():
        for name, kind in _TYPES.items():
            # `type is`, not isinstance: true is an int to Python but not to the schema
            if type(values[name]) is not kind:
                break
        else:
            others = values["others"]
            if not others or not may_be_huge_number(others):
                return Record(**values)
    return _parse_strictly(line, where)


def may_be_huge_number(value: Any) -> bool:
    """Whether orjson may have made a float of an integer: it does so beyond 64 bits."""
    if type(value) is float:
        return abs(value) >= 2.0**63
    if type(value) is dict:
        return any(map(may_be_huge_number, value.values()))
    return type(value) is list and any(map(may_be_huge_number, value))


def _parse_strictly(line: str | bytes, where: str) -> Record:
    if isinstance(line, bytes):
        try:
            line = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(where, f"not UTF-8 ({error.reason} at byte {error.start})", _FIX) from None
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(where, f"not JSON ({error.msg} at column {error.colno})", _FIX) from None
    except RecursionError:
        raise DataError(where, "not a record (JSON nested too deeply)", _FIX) from None
    if not isinstance(values, dict):
        raise DataError(where, f"{_RULE}, not a {type(values).__name__}", _FIX)
    if values.keys() != _TYPES.keys():
        missing = [name for name in _TYPES if name not in values]
        extra = [name for name in values if name not in _TYPES]
        parts = [f"{label} {', '.join(names)}" for label, names in (("missing", missing), ("unknown", extra)) if names]
        raise DataError(f"{where}, keys {' and '.join(parts)}", _RULE, "Keep further values under `others`. " + _FIX)
    for name, kind in _TYPES.items():
        if type(values[name]) is not kind:
            raise DataError(f"{where}, {name} is a {type(values[name]).__name__}", _RULE, _FIX)
    # UTF-8 cannot carry half a surrogate pair, but a JSON escape can; no tokenizer takes one.
    if "\\ud" in line or "\\uD" in line:
        for name, value in values.items():
            if isinstance(value, str) and has_lone_surrogate(value):
                raise DataError(f"{where}, {name} holds half a surrogate pair", "text must be valid Unicode", _FIX)
    return Record(**values)


def has_lone_surrogate(text: str) -> bool:
    """Whether the text cannot be written as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def without_lone_surrogates(text: str) -> str:
    """Each half of a surrogate pair becomes U+FFFD, the mark for what could not be read."""
    if not has_lone_surrogate(text):
        return text
    # joins halves that form a pair, replaces those that do not
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
