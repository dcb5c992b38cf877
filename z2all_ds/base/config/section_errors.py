"""Converts a pydantic ValidationError into one problem: where it is, which rule is broken, how to fix it."""

import difflib
import re
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError


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
        near = difflib.get_close_matches(location[-1], known, n=1)
        fix = f"Did you mean {'.'.join([*location[:-1], near[0]])}?" if near else f"Known here: {', '.join(known)}."
        return Problem(location, dotted, "no such setting", fix)
    if first["type"] == "value_error":
        return Problem(location, dotted, str(first["ctx"]["error"]), "")
    # Files have lists and sections, not the Python types that pydantic names.
    rule = re.sub(r" or instance of \w+", "", first["msg"]).replace("valid tuple", "valid list")
    return Problem(location, f"{dotted}={first['input']!r}", rule, more)


def _section_at(root: type[BaseModel], location: list[str]) -> type[BaseModel]:
    """Return the section at this path; `stages.0` is an element of a list, `nodes.n1` one of a dict."""
    section, parts = root, iter(location)
    for part in parts:
        annotation: Any = section.model_fields[part].annotation
        kinds = (annotation, *get_args(annotation))
        section = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
        if get_origin(annotation) in (dict, list, tuple):
            next(parts, None)
    return section
