"""Registry of converters: functions that make drafts, registered with a decorator.

There are two kinds. A *source* is a function from one row of raw data (a dict) to a Draft, whatever the file format. A
*built-in* needs no raw data: it is a generator of drafts.

    @source("my_forum", form="jsonl")
    def my_forum(row):
        '''Threads of my forum.'''
        return Draft(title=row.pop("subject"), content=row.pop("body"), others=row)

A missing field raises KeyError, which the build reports with the position of the row.
"""

import difflib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.errors import ConfigError
from z2all_ds.base.paths import full_path
from z2all_ds.corpus.draft import Draft
from z2all_ds.corpus.forms.slices import Row

ConvertRow = Callable[[Row], Draft]
GenerateDrafts = Callable[[int | None], Iterator[Draft]]


@dataclass(frozen=True)
class Source:
    """A registered function of one row."""

    name: str
    convert: ConvertRow
    form: str
    """jsonl, json_array, parquet, txt, lines, or auto: by the name and the first bytes of the file."""
    is_code: bool
    """Cleaning never alters code."""
    revision: int
    """Increase it when the output changes, so that corpora built before are not reused."""


@dataclass(frozen=True)
class BuiltIn:
    """A registered generator of drafts. Its first documents must be a fair sample of all."""

    name: str
    generate: GenerateDrafts
    is_code: bool
    revision: int


_REGISTRY: dict[str, Source | BuiltIn] = {}
_PLUGINS: set[Path] = set()


def source(name: str, *, form: str, is_code: bool = False, revision: int = 1) -> Callable[[ConvertRow], ConvertRow]:
    """Register a function of one row."""

    def register(convert: ConvertRow) -> ConvertRow:
        _add(Source(name, convert, form, is_code, revision))
        return convert

    return register


def built_in(name: str, *, is_code: bool = False, revision: int = 1) -> Callable[[GenerateDrafts], GenerateDrafts]:
    """Register a generator of drafts. It gets the number of bytes that the build wants, or None."""

    def register(generate: GenerateDrafts) -> GenerateDrafts:
        _add(BuiltIn(name, generate, is_code, revision))
        return generate

    return register


def _add(entry: Source | BuiltIn) -> None:
    if entry.name in _REGISTRY:
        raise ConfigError(f"converter {entry.name!r}", "this name is already registered", "Choose another name.")
    _REGISTRY[entry.name] = entry


def find_converter(name: str) -> Source | BuiltIn:
    """Return the converter of that name; the error for an unknown name lists all."""
    if name in _REGISTRY:
        return _REGISTRY[name]
    near = difflib.get_close_matches(name, _REGISTRY, n=1)
    guess = f"Did you mean {near[0]}? " if near else ""
    rule = f"must be one of {', '.join(sorted(_REGISTRY))}"
    raise ConfigError(f"converter {name!r}", rule, f"{guess}Choose one of these, or load your own with --plugin.")


def describe_converters() -> dict[str, str]:
    """Return name -> first line of the docstring."""
    found = {}
    for name, entry in sorted(_REGISTRY.items()):
        function = entry.convert if isinstance(entry, Source) else entry.generate
        found[name] = (function.__doc__ or "").strip().partition("\n")[0]
    return found


def load_plugin(path: Path) -> None:
    """Run a Python file that registers converters, once per process."""
    path = full_path(path)
    if path in _PLUGINS:
        return
    spec = importlib.util.spec_from_file_location(f"z2all_plugin_{path.stem}", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError(f"plugin {path}", "no such Python file", "Give the path of a .py file with your converters.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"plugin {path}", f"importing it failed ({error!r})", "Correct it.") from error
    _PLUGINS.add(path)
