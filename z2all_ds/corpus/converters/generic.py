"""Raw data of any shape: by a map from record fields to raw fields, or by guessing from common names.

A map reads `content=body,title=meta.subject`: on the left a field of the record, on the right the name in the raw row,
with dots into nested objects (a raw field with that very name, dots and all, comes first). Without a map, the first
name of each list below that the row has is taken. Whatever is not taken goes to `others` under its own name.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from z2all_ds.base.errors import ConfigError
from z2all_ds.corpus.converters.fields import columns_of, refused, text_or_refusal
from z2all_ds.corpus.converters.registry import ConvertRow, source
from z2all_ds.corpus.draft import Draft, RowRefused
from z2all_ds.corpus.forms.slices import Row

CONTENT_NAMES = ("text", "content", "body", "article", "document", "answer", "response", "output", "code")
TITLE_NAMES = ("title", "name", "subject", "headline", "question", "instruction", "prompt", "path")
CATEGORY_NAMES = ("category", "topic")
DESC_NAMES = ("desc", "description", "summary")
RECORD_FIELDS = ("content", "title", "category", "desc")
"""Those a map can fill; `others` takes the rest by itself, and the numbers are given by the build."""

_ABSENT = object()


@source("generic", form="auto")
def generic(row: Row) -> Draft:
    """Any rows: content from text, content, body, answer...; title from title, name...; or as --fields says."""
    content_name, title_name, category_name, desc_name = _chosen_names(tuple(row))
    if not content_name:
        names = ", ".join(CONTENT_NAMES)
        raise RowRefused(f"none of the fields {names} is there; {columns_of(row)}; name one with --fields content=NAME")
    content = row[content_name]
    if type(content) is not str:
        raise refused(row, content_name, content)
    del row[content_name]
    title = _taken(row, title_name) if title_name else ""
    category = _taken(row, category_name) if category_name else ""
    desc = _taken(row, desc_name) if desc_name else ""
    return Draft(title, content, category, desc, row)


@lru_cache(maxsize=1024)
def _chosen_names(columns: tuple[str, ...]) -> tuple[str, str, str, str]:
    """Where content, title, category and desc are; empty if nowhere. Rows of a source have few sets of columns."""
    content, title, category, desc = (
        next((name for name in names if name in columns), "")
        for names in (CONTENT_NAMES, TITLE_NAMES, CATEGORY_NAMES, DESC_NAMES)
    )
    return content, title, category, desc


def _taken(row: Row, name: str) -> str:
    """The value, out of the row, if it is a text or a number: a guess must refuse nothing."""
    value = row[name]
    if type(value) is str:
        del row[name]
        return value
    if type(value) is int or type(value) is float:
        del row[name]
        return str(value)
    return ""


@source("jsonl", form="jsonl")
def jsonl(row: Row) -> Draft:
    """JSON lines, as `generic` reads them."""
    return generic(row)


@source("text", form="txt")
def text(row: Row) -> Draft:
    """Plain text files, each one document with the file's name as its title."""
    return generic(row)


@dataclass(frozen=True)
class FieldMapConverter:
    """A converter by a map. A class, not a closure, as it travels to worker processes."""

    content: str
    title: str = ""
    category: str = ""
    desc: str = ""

    def __call__(self, row: Row) -> Draft:
        content = _look_up(row, self.content)
        if type(content) is not str:
            raise refused(row, self.content) if content is _ABSENT else refused(row, self.content, content)
        # All are looked up before any is removed: two fields of the record may come from the same raw one.
        texts = []
        for path in (self.title, self.category, self.desc):
            value = _look_up(row, path) if path else _ABSENT
            texts.append("" if value is _ABSENT else text_or_refusal(row, path, value))
        for path in {self.content, self.title, self.category, self.desc}:
            if path:
                _remove(row, path)
        return Draft(texts[0], content, texts[1], texts[2], row)


def field_map_converter(fields: Mapping[str, str]) -> ConvertRow:
    """A converter by a map from record fields to raw fields; only the content is needed in every row."""
    for name, path in fields.items():
        if name not in RECORD_FIELDS:
            near = difflib.get_close_matches(name, RECORD_FIELDS, n=1)
            guess = f"Did you mean {near[0]}? " if near else ""
            rule = f"a map fills {', '.join(RECORD_FIELDS)}; everything else goes to others by itself"
            raise ConfigError(f"record field {name!r}", rule, f"{guess}Write it as RECORD_FIELD=RAW_FIELD.")
        if not path:
            raise ConfigError(f"record field {name}", "no raw field is named", f"E.g. {name}=text.")
    if "content" not in fields:
        raise ConfigError("field map", "it does not say where the content comes from", "Add content=NAME.")
    return FieldMapConverter(**fields)


def parse_field_map(text: str) -> dict[str, str]:
    """`content=body,title=meta.subject` -> {"content": "body", "title": "meta.subject"}."""
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, equals, path = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not path:
            raise ConfigError(f"field map {text!r}", f"{part!r} is not RECORD_FIELD=RAW_FIELD", "E.g. content=body.")
        if name in fields:
            raise ConfigError(f"field map {text!r}", f"{name} is named twice", "Leave one of them out.")
        fields[name] = path
    return fields


def _look_up(row: Row, path: str) -> Any:
    """The value at a path, or _ABSENT."""
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        if type(value) is not dict or name not in value:
            return _ABSENT
        value = value[name]
    return value


def _remove(row: Row, path: str) -> None:
    if path in row:
        del row[path]
        return
    *outer, last = path.split(".")
    value: Any = row
    for name in outer:
        value = value.get(name) if type(value) is dict else None
    if type(value) is dict:
        value.pop(last, None)
