"""Takes texts out of a row of raw data, and describes rows that do not have them.

A build calls these functions for every row, tens of millions of times: a valid row costs one lookup and one type check
per field.
"""

from typing import Any

from z2all_ds.corpus.draft import Draft, RowRefused
from z2all_ds.corpus.forms.slices import Row

COLUMNS_SHOWN = 20
VALUE_CHARS_SHOWN = 40
ABSENT = object()
"""The value of a missing field."""


def take_draft(row: Row, content_field: str, title_field: str, category_field: str = "", desc_field: str = "") -> Draft:
    """Return a draft of these fields; the rest of the row becomes `others`.

    Content and title are required. A number is accepted as a title, but not as content.
    """
    content, title = row.get(content_field), row.get(title_field)
    # Both are checked before either is removed, so that the message lists all columns.
    if type(content) is not str:
        raise refused(row, content_field, row.get(content_field, ABSENT))
    if type(title) is int or type(title) is float:
        title = str(title)
    elif type(title) is not str:
        raise refused(row, title_field, row.get(title_field, ABSENT))
    del row[content_field], row[title_field]
    category = take_optional(row, category_field) if category_field else ""
    desc = take_optional(row, desc_field) if desc_field else ""
    return Draft(title, content, category, desc, row)


def take_optional(row: Row, name: str) -> str:
    """Remove a field from the row and return it as text; "" if it is missing."""
    value = row.pop(name, None)
    return value if type(value) is str else text_or_refusal(row, name, value)


def text_or_refusal(row: Row, name: str, value: Any) -> str:
    """Return an optional value as text: "" for null, digits for a number. Other types are refused."""
    if type(value) is str:
        return value
    if value is None:
        return ""
    if type(value) is int or type(value) is float:
        return str(value)
    raise refused({name: value, **row}, name, value)


def refused(row: Row, name: str, value: Any) -> RowRefused:
    """Return the error for a field that is missing or not text, with the columns of the row."""
    if value is ABSENT:
        found = "is missing"
    elif value is None:
        found = "is null"
    else:
        shown = repr(value)
        shown = shown if len(shown) <= VALUE_CHARS_SHOWN else shown[: VALUE_CHARS_SHOWN - 3] + "..."
        found = f"is {_json_type(value)} ({shown}), not text"
    return RowRefused(f"field {name} {found}; {columns_of(row)}")


def columns_of(row: Row) -> str:
    """Return `the row has a, b, c`, with the first columns of a wide table."""
    if not row:
        return "the row has no fields"
    names = [str(name) for name in row]
    more = f" and {len(names) - COLUMNS_SHOWN} more" if len(names) > COLUMNS_SHOWN else ""
    return f"the row has {', '.join(names[:COLUMNS_SHOWN])}{more}"


def _json_type(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
