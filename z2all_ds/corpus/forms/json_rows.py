"""Parses JSON and text with exact error messages, and repairs what can be repaired.

Readers parse with orjson and call the slow parser only when orjson fails or a value looks suspicious. The slow parser
accepts what orjson rejects or changes: lone surrogates become U+FFFD, integers beyond 64 bits stay exact.
"""

import json
import math
from typing import Any, NoReturn

import orjson

from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.slices import Row
from z2all_ds.corpus.schema import may_be_huge_number, without_lone_surrogates


class BadValue(ValueError):
    """A value that a corpus cannot store; `fault` gives the reason."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.fault = Fault(kind, detail)


def parse_row(data: bytes) -> Row | Fault:
    """Return the JSON object in these bytes, or a fault."""
    try:
        row = orjson.loads(data)
    except ValueError:
        return parse_row_slowly(data)
    if type(row) is not dict or b"\\u0000" in data or may_be_huge_number(row):
        return parse_row_slowly(data)
    return row


def parse_row_slowly(data: bytes) -> Row | Fault:
    """Return the JSON object in these bytes, or a fault, without orjson."""
    text = decode_text(data)
    if isinstance(text, Fault):
        return text
    try:
        value = _DECODER.decode(text)
        if isinstance(value, dict):
            return _repaired(value, "")
    except BadValue as refused:
        return refused.fault
    except json.JSONDecodeError as error:
        return Fault("json", f"{error.msg} at column {error.colno}")
    except RecursionError:
        return Fault("json", "nested too deeply")
    except ValueError as error:  # an integer of more than 4,300 digits
        return Fault("json", str(error).partition(";")[0])
    return Fault("not_an_object", f"expected an object {{...}}, found a {_JSON_NAMES[type(value)]}")


def decode_text(data: bytes) -> str | Fault:
    """Return the text in these bytes, or a fault."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return utf8_fault(error)
    return Fault("nul", f"NUL byte at byte {data.index(0)}; possibly a binary file") if "\0" in text else text


def utf8_fault(error: UnicodeDecodeError) -> Fault:
    encoding = "UTF-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "GB18030"
    hint = f"if the file has another encoding: iconv -f {encoding} -t UTF-8"
    return Fault("utf8", f"{error.reason} at byte {error.start}; {hint}")


def _refuse_constant(name: str) -> NoReturn:
    raise BadValue("json", f"{name} is not valid JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_JSON_NAMES = {str: "string", int: "number", float: "number", bool: "boolean", type(None): "null", list: "list"}


def _repaired(value: Any, path: str) -> Any:
    """Return the value without lone surrogates; raise BadValue for what a corpus cannot store."""
    if isinstance(value, str):
        if "\0" in value:
            raise BadValue("nul", f"\\u0000 in the text{path and f' of {path[1:]!r}'}")
        return without_lone_surrogates(value)
    if isinstance(value, dict):
        return {_repaired(key, path): _repaired(inner, f"{path}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_repaired(inner, path) for inner in value]
    if isinstance(value, float) and math.isinf(value):
        raise BadValue("json", f"number out of range{path and f' in {path[1:]!r}'}")
    return value
