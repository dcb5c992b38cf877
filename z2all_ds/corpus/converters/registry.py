"""The converters by name: functions that make drafts, registered with one decorator.

There are two kinds. A *source* is a function from one row of raw data (a dict) to a Draft; what file it came in is none
of its business. A *built-in* needs no raw data: it is a generator of drafts.

    @source("my_forum", form="jsonl")
    def my_forum(row):
        '''Threads of my forum.'''
        return Draft(title=row.pop("subject"), content=row.pop("body"), others=row)

A row that lacks what is taken from it raises KeyError, which the build reports with its place.
"""

import difflib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.errors import ConfigError
from z2all_ds.corpus.draft import Draft
from z2all_ds.corpus.forms.slices import Row

ConvertRow = Callable[[Row], Draft]
GenerateDrafts = Callable[[int | None], Iterator[Draft]]


@dataclass(frozen=True)
class Source:
    """A registered source of rows."""

    name: str
    convert: ConvertRow
    form: str
    """jsonl, json_array, parquet, txt, lines, or auto: by the file's name and first character."""
    is_code: bool
    """Text of code is never altered by cleaning."""
    revision: int
    """Raise it when the output changes, so that corpora of the old kind are not taken for new ones."""


@dataclass(frozen=True)
class BuiltIn:
    """A registered generator of drafts; any beginning of its stream is a fair sample of the whole."""

    name: str
    generate: GenerateDrafts
    is_code: bool
    revision: int


_REGISTRY: dict[str, Source | BuiltIn] = {}


def source(name: str, *, form: str, is_code: bool = False, revision: int = 1) -> Callable[[ConvertRow], ConvertRow]:
    """Registers a function of one row."""

    def register(convert: ConvertRow) -> ConvertRow:
        _add(Source(name, convert, form, is_code, revision))
        return convert

    return register


def built_in(name: str, *, is_code: bool = False, revision: int = 1) -> Callable[[GenerateDrafts], GenerateDrafts]:
    """Registers a generator of drafts. It gets the number of bytes the build wants, or None."""

    def register(generate: GenerateDrafts) -> GenerateDrafts:
        _add(BuiltIn(name, generate, is_code, revision))
        return generate

    return register


def _add(entry: Source | BuiltIn) -> None:
    if entry.name in _REGISTRY:
        raise ConfigError(f"converter {entry.name!r}", "there is one of that name already", "Choose another name.")
    _REGISTRY[entry.name] = entry


def find_converter(name: str) -> Source | BuiltIn:
    """The converter of that name; a miss lists those there are."""
    if name in _REGISTRY:
        return _REGISTRY[name]
    near = difflib.get_close_matches(name, _REGISTRY, n=1)
    guess = f"Did you mean {near[0]}? " if near else ""
    rule = f"the converters are {', '.join(sorted(_REGISTRY))}"
    raise ConfigError(f"converter {name!r}", rule, f"{guess}Choose one of these, or give --plugin with your own.")


def describe_converters() -> dict[str, str]:
    """Name -> first line of its docstring, for those who look for one."""
    return {
        name: (_function(found).__doc__ or "").strip().partition("\n")[0] for name, found in sorted(_REGISTRY.items())
    }


def _function(entry: Source | BuiltIn) -> Callable[..., object]:
    return entry.convert if isinstance(entry, Source) else entry.generate


_PLUGINS: set[Path] = set()


def load_plugin(path: Path) -> None:
    """Runs a Python file that registers converters; once per process, however often it is asked for."""
    path = path.resolve()
    if path in _PLUGINS:
        return
    spec = importlib.util.spec_from_file_location(f"z2all_plugin_{path.stem}", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError(f"plugin {path}", "no such Python file", "Give the path of a .py file with your converters.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"plugin {path}", f"it fails when run ({error!r})", "Correct it.") from error
    _PLUGINS.add(path)
