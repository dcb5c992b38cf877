"""Converters of rows with any fields: by a map from record fields to raw fields, or by common names.

A map is written `content=body,title=meta.subject`: a field of the record, and the name in the raw row, with dots for
nested objects (a raw field whose name contains the dots has priority). Without a map, the first name of each list below
that the row has is used. All other fields go to `others`.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from z2all_ds.base.errors import ConfigError
from z2all_ds.corpus.converters.fields import ABSENT, columns_of, refused, text_or_refusal
from z2all_ds.corpus.converters.registry import ConvertRow, source
from z2all_ds.corpus.draft import Draft, RowRefused
from z2all_ds.corpus.forms.slices import Row

CONTENT_NAMES = ("text", "content", "body", "article", "document", "answer", "response", "output", "code")
TITLE_NAMES = ("title", "name", "subject", "headline", "question", "instruction", "prompt", "path")
CATEGORY_NAMES = ("category", "topic")
DESC_NAMES = ("desc", "description", "summary")
RECORD_FIELDS = ("content", "title", "category", "desc")
"""Fields that a map can fill; `others` gets the rest, and the build assigns the numbers."""


@source("generic", form="auto")
def generic(row: Row) -> Draft:
    """Any rows: content from text, content, body, answer...; title from title, name...; or by --fields."""
    content_name, title_name, category_name, desc_name = _chosen_names(tuple(row))
    if not content_name:
        names = ", ".join(CONTENT_NAMES)
        raise RowRefused(f"has none of the fields {names}; {columns_of(row)}; name one with --fields content=NAME")
    content = row[content_name]
    if type(content) is not str:
        raise refused(row, content_name, content)
    del row[content_name]
    return Draft(_take(row, title_name), content, _take(row, category_name), _take(row, desc_name), row)


@lru_cache(maxsize=1024)
def _chosen_names(columns: tuple[str, ...]) -> list[str]:
    """Return the fields of content, title, category and desc, "" for none. A source has few sets of columns."""
    lists = (CONTENT_NAMES, TITLE_NAMES, CATEGORY_NAMES, DESC_NAMES)
    return [next((name for name in names if name in columns), "") for names in lists]


def _take(row: Row, name: str) -> str:
    """Remove a text or a number from the row and return it as text. A guess refuses nothing, so others stay."""
    kind = type(row[name]) if name else None
    if kind is str:
        return row.pop(name)
    return str(row.pop(name)) if kind is int or kind is float else ""


@source("jsonl", form="jsonl")
def jsonl(row: Row) -> Draft:
    """JSON lines, converted like `generic`."""
    return generic(row)


@source("text", form="txt")
def text(row: Row) -> Draft:
    """Plain text files, one document per file, with the file name as its title."""
    return generic(row)


@dataclass(frozen=True)
class FieldMapConverter:
    """A converter by a map. A class, because worker processes need to unpickle it."""

    content: str
    title: str = ""
    category: str = ""
    desc: str = ""

    def __call__(self, row: Row) -> Draft:
        parent, name = _find(row, self.content)
        content = parent.get(name, ABSENT)
        if type(content) is not str:
            raise refused(row, self.content, content)
        # All are looked up before any is removed: two fields of the record may use the same raw field.
        found, texts = [(parent, name)], []
        for path in (self.title, self.category, self.desc):
            parent, name = _find(row, path) if path else ({}, "")
            found.append((parent, name))
            texts.append(text_or_refusal(row, path, parent.get(name)))
        for parent, name in found:
            parent.pop(name, None)
        return Draft(texts[0], content, texts[1], texts[2], row)


def field_map_converter(fields: Mapping[str, str]) -> ConvertRow:
    """Return a converter by a map from record fields to raw fields. Only the content is required in every row."""
    for name, path in fields.items():
        if name not in RECORD_FIELDS:
            near = difflib.get_close_matches(name, RECORD_FIELDS, n=1)
            guess = f"Did you mean {near[0]}? " if near else ""
            rule = f"must be one of {', '.join(RECORD_FIELDS)}; all other fields go to others"
            raise ConfigError(f"record field {name!r}", rule, f"{guess}Write it as RECORD_FIELD=RAW_FIELD.")
        if not path:
            raise ConfigError(f"record field {name}", "has no raw field", f"E.g. {name}=text.")
    if "content" not in fields:
        raise ConfigError("field map", "has no field for the content", "Add content=NAME.")
    return FieldMapConverter(**fields)


def parse_field_map(text: str) -> dict[str, str]:
    """Parse `content=body,title=meta.subject` into {"content": "body", "title": "meta.subject"}."""
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, equals, path = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not path:
            raise ConfigError(f"field map {text!r}", f"{part!r} must be RECORD_FIELD=RAW_FIELD", "E.g. content=body.")
        if name in fields:
            raise ConfigError(f"field map {text!r}", f"sets {name} twice", "Remove one of them.")
        fields[name] = path
    return fields


def _find(row: Row, path: str) -> tuple[Row, str]:
    """Return the object that contains the field at a path, or {}, and the name of the field in it."""
    if path in row:
        return row, path
    *outer, last = path.split(".")
    value: Any = row
    for name in outer:
        value = value.get(name) if type(value) is dict else None
    return (value if type(value) is dict else {}), last
