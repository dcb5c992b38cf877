"""The record: the format of a document in a shard, and its strict parser.

One record is one line of JSON in UTF-8. A line ends at the line feed: a text may contain U+2028 or U+0085, where
Python's `str.splitlines()` breaks and reading a file line by line does not. Parsing is strict, so that an invalid line
is reported with its location and does not appear as an unexplained loss during training.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_origin

import orjson

from z2all_ds.base.errors import DataError


@dataclass(frozen=True)
class Record:
    """One document of the corpus."""

    gid: int
    """Number of the document in the corpus; unique."""
    id: int
    """Number of the document in its source."""
    data_src: str
    """Name of the source; the domain, in corpora built here."""
    category: str
    """Kind of text, in a word or two."""
    title: str
    content: str
    """The text that a model is trained on."""
    desc: str
    """Description in a sentence."""
    others: dict[str, Any] = field(default_factory=dict)
    """Other fields of the source, as JSON values."""

    def to_line(self) -> str:
        """Return the record as one line of JSON, without the line feed."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


_TYPES: dict[str, Any] = {field.name: get_origin(field.type) or field.type for field in fields(Record)}
_RULE = "a record is one JSON object with " + ", ".join(f"{name}:{kind.__name__}" for name, kind in _TYPES.items())
_FIX = "Repair or remove the line and rebuild the corpus; `z2all corpus audit` lists all invalid lines."


def parse_record(line: str | bytes, where: str) -> Record:
    """Parse one line. `where` is its file and line (`code-00000.jsonl:17`), for errors."""
    # orjson is more than twice as fast as the standard library (345 compared with 150 MB/s). Lines that it refuses or
    # would read differently are parsed by the standard library, with detailed errors.
    try:
        values = orjson.loads(line)
    except orjson.JSONDecodeError:
        return _parse_strictly(line, where)
    if type(values) is dict and values.keys() == _TYPES.keys():
        for name, kind in _TYPES.items():
            # `type is`, not isinstance: True is an int in Python but not in the schema
            if type(values[name]) is not kind:
                break
        else:
            others = values["others"]
            if not others or not may_be_huge_number(others):
                return Record(**values)
    return _parse_strictly(line, where)


def may_be_huge_number(value: Any) -> bool:
    """Return whether orjson may have turned an integer into a float; it does so beyond 64 bits."""
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
    except ValueError as error:  # an integer of more than 4,300 digits
        raise DataError(where, f"not a record ({str(error).partition(';')[0]})", _FIX) from None
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
    # A JSON escape can encode half a surrogate pair; UTF-8 and tokenizers cannot.
    if "\\ud" in line or "\\uD" in line:
        for name, value in values.items():
            if isinstance(value, str) and has_lone_surrogate(value):
                raise DataError(f"{where}, {name} contains half a surrogate pair", "text must be valid Unicode", _FIX)
    return Record(**values)


def has_lone_surrogate(text: str) -> bool:
    """Return whether the text cannot be encoded as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def without_lone_surrogates(text: str) -> str:
    """Replace each half of a surrogate pair by U+FFFD; complete pairs become one character."""
    if not has_lone_surrogate(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
