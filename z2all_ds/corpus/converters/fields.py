"""Takes texts out of a row of raw data, and says in one line what is wrong with a row that does not have them.

A build calls these for every row, tens of millions of times: the good case is one look and one type check.
"""

from typing import Any

from z2all_ds.corpus.draft import RowRefused
from z2all_ds.corpus.forms.slices import Row

COLUMNS_SHOWN = 20
VALUE_CHARS_SHOWN = 40
_ABSENT = object()


def take_needed(row: Row, content_field: str, title_field: str) -> tuple[str, str]:
    """(content, title), removed from the row. Both must be there; a number may be a title, but is no content."""
    content, title = row.get(content_field), row.get(title_field)
    if type(content) is str and type(title) is str:
        del row[content_field]
        # the same field for both is allowed
        row.pop(title_field, None)
        return content, title
    # Both are looked at before either is removed, so that the message lists all columns.
    if type(content) is not str:
        raise refused(row, content_field, row.get(content_field, _ABSENT))
    if type(title) is not int and type(title) is not float:
        raise refused(row, title_field, row.get(title_field, _ABSENT))
    del row[content_field], row[title_field]
    return content, str(title)


def take_optional(row: Row, name: str) -> str:
    """A text removed from the row; "" if it is missing or null, a number in digits."""
    value = row.get(name)
    if type(value) is str:
        del row[name]
        return value
    return text_or_refusal(row, name, row.pop(name)) if name in row else ""


def text_or_refusal(row: Row, name: str, value: Any) -> str:
    """What an optional value is as text: null is "", a number its digits; a list, an object or a truth is refused."""
    if type(value) is str:
        return value
    if value is None:
        return ""
    if type(value) is int or type(value) is float:
        return str(value)
    raise refused({name: value, **row}, name, value)


def refused(row: Row, name: str, value: Any = _ABSENT) -> RowRefused:
    """The error for a field that is missing or not text, with the columns the row has."""
    if value is _ABSENT:
        found = "is missing"
    elif value is None:
        found = "is null"
    else:
        found = f"is {_kind(value)} ({shortened(value)}), not text"
    return RowRefused(f"field {name} {found}; {columns_of(row)}")


def columns_of(row: Row) -> str:
    """`the row has a, b, c`, of a wide table the first few."""
    if not row:
        return "the row has no fields at all"
    names = [str(name) for name in row]
    more = f" and {len(names) - COLUMNS_SHOWN} more" if len(names) > COLUMNS_SHOWN else ""
    return f"the row has {', '.join(names[:COLUMNS_SHOWN])}{more}"


def shortened(value: Any) -> str:
    """A value for a message."""
    shown = repr(value)
    return shown if len(shown) <= VALUE_CHARS_SHOWN else shown[: VALUE_CHARS_SHOWN - 3] + "..."


def _kind(value: Any) -> str:
    """As JSON calls it, since that is what the user sees in the file."""
    words = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return words.get(type(value), f"a {type(value).__name__}")
