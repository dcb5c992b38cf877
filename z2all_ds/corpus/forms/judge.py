"""Says exactly what is wrong with a piece of JSON or text, and saves what can be saved of it.

Readers parse with orjson and call this only when it fails or when a value looks odd, so it may be slow. It saves what
orjson refuses or changes: halves of surrogate pairs become U+FFFD, integers beyond 64 bits stay exact.
"""

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.slices import Row
from z2all_ds.corpus.schema import may_be_huge_number, without_lone_surrogates

BOM = b"\xef\xbb\xbf"


class BadValue(ValueError):
    """A value that no corpus can hold; `fault` says why."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.fault = Fault(kind, detail)


def fast_loads() -> Callable[[bytes], Any]:
    """Returns orjson.loads; without orjson a function that always fails, so that judge_json reads every row."""
    try:
        import orjson
    except ImportError:
        return _no_loads
    return orjson.loads


def _no_loads(_: bytes) -> NoReturn:
    raise ValueError("orjson is not installed")


def judge_json(data: bytes) -> Row | Fault:
    """Returns the row in these bytes, or why there is none."""
    text = decode_text(data)
    if isinstance(text, Fault):
        return text
    try:
        value = _DECODER.decode(text)
        if isinstance(value, dict):
            return _mended(value, "")
    except BadValue as refused:
        return refused.fault
    except json.JSONDecodeError as error:
        return Fault("json", f"{error.msg} at column {error.colno}")
    except RecursionError:
        return Fault("json", "nested too deeply")
    except ValueError as error:  # an integer of more than 4,300 digits
        return Fault("json", str(error).partition(";")[0])
    return Fault("not_an_object", f"a {_JSON_NAMES[type(value)]}, where an object {{...}} is needed")


def read_object(data: bytes, loads: Callable[[bytes], Any]) -> Row | Fault:
    """Returns the row in these bytes, by `loads` where nothing is odd, else by judge_json."""
    try:
        row = loads(data)
    except ValueError:
        return judge_json(data)
    if type(row) is not dict or b"\\u0000" in data or may_be_huge_number(row):
        return judge_json(data)
    return row


def decode_text(data: bytes) -> str | Fault:
    """Returns the text in these bytes, or why there is none."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return utf8_fault(error)
    return Fault("nul", f"a NUL byte at byte {data.index(0)}; a binary file?") if "\0" in text else text


def utf8_fault(error: UnicodeDecodeError) -> Fault:
    data = bytes(error.object[:2])
    encoding = "UTF-16" if data in (b"\xff\xfe", b"\xfe\xff") else "GB18030"
    hint = f"perhaps another encoding: iconv -f {encoding} -t UTF-8"
    return Fault("utf8", f"{error.reason} at byte {error.start}; {hint}")


def _refuse_constant(name: str) -> NoReturn:
    raise BadValue("json", f"{name} is no JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_JSON_NAMES = {str: "string", int: "number", float: "number", bool: "truth value", type(None): "null", list: "list"}


def _mended(value: Any, path: str) -> Any:
    """Returns the value without lone surrogates; refuses what no corpus can hold."""
    if isinstance(value, str):
        if "\0" in value:
            raise BadValue("nul", f"\\u0000 in the text{path and f' of {path[1:]!r}'}")
        return without_lone_surrogates(value)
    if isinstance(value, dict):
        return {_mended(key, path): _mended(inner, f"{path}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_mended(inner, path) for inner in value]
    if isinstance(value, float) and math.isinf(value):
        raise BadValue("json", f"a number beyond all floats{path and f' in {path[1:]!r}'}")
    return value
