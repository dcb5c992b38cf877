"""The draft: a record without its numbers, as a converter makes it from one row of raw data."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Draft:
    """A record without its numbers. Not frozen: a build makes tens of millions, and frozen ones cost three times."""

    title: str
    content: str
    category: str = ""
    desc: str = ""
    others: dict[str, Any] = field(default_factory=dict)


class RowRefused(Exception):
    """A converter's word that a row is not what its source promises; the text says what is wrong with it."""
