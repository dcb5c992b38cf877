"""The settings for people: all names, what an option such as `--steps 5` may mean, and the config with its help."""

import json
import shlex
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from z2all_ds.base.config.run_config import WHOLE_VALUES, RunConfig
from z2all_ds.base.config.section_errors import dotted_settings, element_section
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.paths import refuse_passwords
from z2all_ds.base.reports import plain

WIDTH = 100
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def refuse_option(option: str, arguments: list[str]) -> None:
    """Raise if an unknown option of these arguments is a setting: `--steps 5` must be `train.steps=5`."""
    wanted, names = option.lstrip("-").replace("-", "_"), dotted_settings(RunConfig)
    if wanted == "dry_run":  # the setting of this name is the memory check of a real training
        fix = "Use `z2all plan`, or `z2all launch --hostfile H --dry-run -- ...`; neither trains."
        raise ConfigError(option, "is not an option here", fix)
    meant = [wanted] if wanted in names else [name for name in names if name.endswith(f".{wanted}")]
    if not meant:
        return
    values = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"{option}=")]
    values += [after for given, after in pairwise(arguments) if given == option and not after.startswith("--")]
    value = values[0] if values else "VALUE"
    fix = " or ".join(shlex.quote(_override(name, value)) for name in meant)
    raise ConfigError(option, "is a setting, not an option", f"Write {fix}.")


def _override(name: str, value: str) -> str:
    """Return the override that sets this value; `a=1` is an entry of a setting of type dict."""
    is_entry = name.rpartition(".")[2] in WHOLE_VALUES and "=" in value
    return f"{name}.{value}" if is_entry else f"{name}={value}"


def explained_yaml(config: RunConfig) -> str:
    """Return the resolved config as YAML, with help, limits, choices and default of every setting as comments."""
    fields = config.model_dump(mode="json")
    refuse_passwords(fields)
    return "\n".join(_lines(RunConfig, fields, "")) + "\n"


def _lines(section: type[BaseModel], values: dict[str, Any], indent: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from ("", *_comment(inner.__doc__ or "", indent), f"{indent}{name}:")
            yield from _lines(inner, values[name], indent + "  ")
            continue
        yield from _comment(_help(field), indent)
        if (element := element_section(field)) is not None:
            for key, one in element.model_fields.items():
                yield from _comment(f"  {key}: {_help(one)}", indent)
        yield f"{indent}{name}: {_yaml(values[name])}"


def _help(field: FieldInfo) -> str:
    """Return the field's description, its choices or limits, and its default."""
    choices, limits = _choices(field.annotation), [f"{BOUNDS[key]} {bound:g}" for key, bound in _limits(field)]
    facts = [f"One of {', '.join(map(str, choices))}."] if choices else []
    facts += [f"Must be {' and '.join(limits)}."] if limits else []
    description = field.description or ""
    if field.is_required():
        facts.append("Required.")
    elif field.default is not None or "default" not in description.lower():
        facts.append(f"Default: {_yaml(field.default)}.")
    return " ".join([*description.split(), *facts])


def _choices(annotation: Any) -> list[Any]:
    """Return the values of a Literal, also inside a tuple or an optional type."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _limits(field: FieldInfo) -> Iterator[tuple[str, float]]:
    for rule in field.metadata:
        yield from ((key, getattr(rule, key)) for key in BOUNDS if hasattr(rule, key))


def _yaml(value: Any) -> str:
    """Return the value as YAML on one line."""
    value = plain(value)
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=True, width=10**6)
    text = text.removesuffix("\n").removesuffix("\n...")
    return json.dumps(value) if "\n" in text else text


def _comment(text: str, indent: str) -> list[str]:
    further = "    " if text.startswith(" ") else ""
    lines = textwrap.wrap(text, WIDTH - len(indent), break_on_hyphens=False, subsequent_indent=further)
    return [f"{indent}# {line}" for line in lines]
