"""What is wrong with a piece of JSON, said slowly and exactly; and what can be saved of it.

Readers parse with orjson and come here only when it fails or when a value looks odd, so this may take its time. It
saves what orjson refuses or bends: halves of surrogate pairs become U+FFFD, integers beyond 64 bits stay exact.
"""

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.slices import Row
from z2all_ds.corpus.schema import may_be_huge_number, without_lone_surrogates

BOM = b"\xef\xbb\xbf"


class _Refused(ValueError):
    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.fault = Fault(kind, detail)


def fast_loads() -> Callable[[bytes], Any]:
    """orjson's; without orjson one that always fails, so that every row goes the slow, exact way."""
    try:
        import orjson
    except ImportError:
        return _no_loads
    return orjson.loads


def _no_loads(_: bytes) -> NoReturn:
    raise ValueError("orjson is not installed")


def judge_json(data: bytes) -> Row | Fault:
    """The row in these bytes, or why there is none."""
    if 0 in data:
        return Fault("nul", f"a NUL byte at byte {data.index(0)}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return utf8_fault(error)
    try:
        value = _DECODER.decode(text)
        if isinstance(value, dict):
            return _mended(value, "")
    except _Refused as refused:
        return refused.fault
    except json.JSONDecodeError as error:
        return Fault("json", f"{error.msg} at column {error.colno}")
    except RecursionError:
        return Fault("json", "nested too deeply")
    except ValueError as error:  # an integer of more than 4,300 digits
        return Fault("json", str(error).partition(";")[0])
    return Fault("not_an_object", f"a {_JSON_NAMES[type(value)]}, where an object {{...}} is needed")


def read_object(data: bytes, loads: Callable[[bytes], Any]) -> Row | Fault:
    """The row in these bytes: the fast way where nothing is odd, else judged."""
    try:
        row = loads(data)
    except ValueError:
        return judge_json(data)
    if type(row) is not dict or b"\\u0000" in data or may_be_huge_number(row):
        return judge_json(data)
    return row


def utf8_fault(error: UnicodeDecodeError) -> Fault:
    data = bytes(error.object[:2])
    encoding = "UTF-16" if data in (b"\xff\xfe", b"\xfe\xff") else "GB18030"
    hint = f"perhaps another encoding: iconv -f {encoding} -t UTF-8"
    return Fault("utf8", f"{error.reason} at byte {error.start}; {hint}")


def _refuse_constant(name: str) -> NoReturn:
    raise _Refused("json", f"{name} is no JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_JSON_NAMES = {str: "string", int: "number", float: "number", bool: "truth value", type(None): "null", list: "list"}


def _mended(value: Any, path: str) -> Any:
    """The same value without lone surrogates; refuses what no corpus can hold."""
    if isinstance(value, str):
        if "\0" in value:
            raise _Refused("nul", f"\\u0000 in the text{path and f' of {path.lstrip(chr(46))!r}'}")
        return without_lone_surrogates(value)
    if isinstance(value, dict):
        return {_mended(key, path): _mended(inner, f"{path}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_mended(inner, path) for inner in value]
    if isinstance(value, float) and math.isinf(value):
        raise _Refused("json", f"a number beyond all floats{path and f' in {path.lstrip(chr(46))!r}'}")
    return value
