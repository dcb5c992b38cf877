"""Converts a pydantic ValidationError into one problem: where it is, which rule is broken, how to fix it."""

import difflib
import re
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo


class Problem(NamedTuple):
    """The first problem found; `location` is its path through sections, lists and names."""

    location: list[str]
    what: str
    rule: str
    fix: str


def first_problem(error: ValidationError, root: type[BaseModel], more: str) -> Problem:
    """Return the first problem. `root` is the validated section; `more` says where its settings are documented."""
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    dotted = ".".join(location)
    if first["type"] == "extra_forbidden":
        fields = _section_at(root, location[:-1]).model_fields
        known = [field.alias or name for name, field in fields.items()]
        meant = _meant(root, location, known)
        fix = f"Did you mean {' or '.join(meant)}?" if meant else f"Known here: {', '.join(known)}."
        return Problem(location, dotted, "no such setting", fix)
    if first["type"] == "value_error":
        return Problem(location, dotted, str(first["ctx"]["error"]), "")
    what = f"{dotted}={first['input']!r}"
    if first["type"] == "literal_error":
        choices = first["ctx"]["expected"].replace("'", "")
        return Problem(location, what, f"must be {choices}", "Choose one of these.")
    name, colon, value = "".join(location[-1:]).partition(":")
    if colon and first["input"] is None:  # YAML reads {code:1} as the name `code:1` without a value
        rule = f"{{{location[-1]}}} has no value"
        return Problem(location, ".".join(location[:-1]), rule, f"Write {{{name}: {value or 'VALUE'}}}, with a space.")
    # Files have lists and sections, not the Python types that pydantic names.
    rule = re.sub(r" or instance of \w+", "", first["msg"]).replace("valid tuple", "valid list")
    return Problem(location, what, rule, more)


def _meant(root: type[BaseModel], location: list[str], known: list[str]) -> list[str]:
    """Return the settings that an unknown one may stand for, with their sections; `known` are those of its section."""
    *section, wrong = location
    names = dotted_settings(root)
    if found := [name for name in names if name.endswith(f".{wrong}")]:
        return found
    if section and (near := difflib.get_close_matches(wrong, known, n=1)):
        return [".".join([*section, *near])]
    ends = dict.fromkeys([*known, *(name.rpartition(".")[2] for name in names)])
    near = difflib.get_close_matches(wrong, ends, n=1)
    if not section and near and near[0] in known:
        return near
    return [name for end in near for name in names if f".{name}".endswith(f".{end}")]


def dotted_settings(root: type[BaseModel]) -> list[str]:
    """Return the names of all settings, e.g. `train.steps`; not those of elements of lists."""
    names = []
    for name, field in root.model_fields.items():
        inner: Any = field.annotation
        is_section = isinstance(inner, type) and issubclass(inner, BaseModel)
        names += [f"{name}.{below}" for below in dotted_settings(inner)] if is_section else [field.alias or name]
    return names


def element_section(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that describes the elements of a list or dict, if the field is one of sections."""
    kinds = get_args(field.annotation)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _section_at(root: type[BaseModel], location: list[str]) -> type[BaseModel]:
    """Return the section at this path; `stages.0` is an element of a list, `nodes.n1` one of a dict."""
    section, parts = root, iter(location)
    for part in parts:
        field = section.model_fields[part]
        annotation: Any = field.annotation
        section = element_section(field) or annotation
        if get_origin(annotation) in (dict, list, tuple):
            next(parts, None)
    return section
