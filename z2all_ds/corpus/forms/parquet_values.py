"""Parquet's values as plain JSON values: times as ISO text, decimals as text, bytes as the text they hold."""

import base64
import datetime
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.judge import utf8_fault

Column = tuple[list[Any], dict[int, Fault]]
"""The values of one column in one batch, and what is wrong with some of them, by row."""


class _BadValue(ValueError):
    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.detail)
        self.fault = fault


def column_values(name: str, column: Any) -> Column:
    """One column of a batch."""
    import pyarrow as pa
    from pyarrow import types

    kind = column.type
    if types.is_dictionary(kind):
        column = column.dictionary_decode()
        kind = column.type
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_null(kind):
        return column.to_pylist(), {}
    if types.is_string(kind) or types.is_large_string(kind):
        try:
            texts = column.to_pylist()
        except UnicodeDecodeError:  # somewhere in it; as bytes each value can be looked at alone
            column = column.cast(pa.large_binary() if types.is_large_string(kind) else pa.binary())
        else:
            return texts, {n: _nul(name) for n, text in enumerate(texts) if text is not None and "\0" in text}
    if types.is_timestamp(kind):
        # Nanoseconds need pandas to become Python objects; nobody dates a document so closely.
        column = column.cast(pa.timestamp("us", kind.tz), safe=False)
    try:
        values = column.to_pylist()
    except (ValueError, OverflowError):
        if not types.is_temporal(kind):
            raise
        values = column.cast(pa.string()).to_pylist()  # years that Python's calendar does not have
    return _each(values, lambda value: _plain(value, name, inside=False))


def _each(values: list[Any], convert: Callable[[Any], Any]) -> Column:
    faults = {}
    for number, value in enumerate(values):
        try:
            values[number] = convert(value)
        except _BadValue as bad:
            faults[number] = bad.fault
    return values, faults


def _nul(name: str) -> Fault:
    return Fault("nul", f"a NUL character in column {name!r}")


def _plain(value: Any, name: str, inside: bool) -> Any:
    """`inside`: of a list or struct. Bytes there are seldom text (pictures), so they may stay bytes, as Base64."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        if "\0" in value:
            raise _BadValue(_nul(name))
        return value
    if isinstance(value, bytes):
        try:
            return _plain(value.decode("utf-8"), name, inside)
        except UnicodeDecodeError as error:
            if inside:
                return base64.b64encode(value).decode("ascii")
            fault = utf8_fault(error)
            raise _BadValue(Fault(fault.kind, f"column {name!r}: {fault.detail}")) from None
    if isinstance(value, dict):
        return {str(_plain(key, name, True)): _plain(inner, name, True) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, name, True) for inner in value]
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    return str(value)
