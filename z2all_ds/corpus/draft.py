"""The draft: a record without numbers, as a converter makes it from one row of raw data; and templates for its content.

A record keeps title, description and content separate, but a model is trained on the content only. A template such as
"{title}\\n{desc}\\n{content}" composes the content from several fields. A template line whose fields are all empty is
left out.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from z2all_ds.base.errors import ConfigError

TEMPLATE_FIELDS = ("title", "desc", "category", "content")
_PLACEHOLDER = re.compile(r"\{(\w*)\}")


@dataclass(slots=True)
class Draft:
    """A record without numbers. Not frozen: a build makes tens of millions, and frozen ones take three times longer."""

    title: str
    content: str
    category: str = ""
    desc: str = ""
    others: dict[str, Any] = field(default_factory=dict)


class RowRefused(Exception):
    """Raised by a converter for a row that does not have the format of its source; the text says why."""


def check_template(template: str) -> None:
    """Raise if a template names an unknown field or lacks the content. An empty template is valid."""
    if not template:
        return
    names = _PLACEHOLDER.findall(template)
    unknown = [name for name in names if name not in TEMPLATE_FIELDS]
    fix = f'Use {", ".join("{" + name + "}" for name in TEMPLATE_FIELDS)}, e.g. "{{title}}\\n{{content}}".'
    if unknown:
        raise ConfigError(f"template {template!r}", f"there is no field {unknown[0]!r}", fix)
    if "content" not in names:
        raise ConfigError(f"template {template!r}", "it must contain {content}", fix)


def compose(draft: Draft, template: str) -> str:
    """Return the content that the template makes from a draft."""
    lines = []
    for line in template.split("\n"):
        names = _PLACEHOLDER.findall(line)
        if not names or any(getattr(draft, name) for name in names):
            lines.append(_PLACEHOLDER.sub(lambda match: getattr(draft, match[1]), line))
    return "\n".join(lines)
