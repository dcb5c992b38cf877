"""Puts a question before its answer, or a title above its text, where the model is to see both.

A record keeps title, description and content apart, and a model is trained on the content alone. With a template such
as "{title}\\n{desc}\\n{content}" the content becomes the whole; a line of it whose fields are all empty is left out.
"""

import re
from collections.abc import Iterable, Iterator

from z2all_ds.base.errors import ConfigError
from z2all_ds.corpus.draft import Draft

FIELDS = ("title", "desc", "category", "content")
_PLACE = re.compile(r"\{(\w*)\}")


def check_template(template: str) -> None:
    """Refuses names that a record does not have, and a template without the content."""
    if not template:
        return
    names = _PLACE.findall(template)
    wrong = [name for name in names if name not in FIELDS]
    fix = f'Use {", ".join("{" + name + "}" for name in FIELDS)}, e.g. "{{title}}\\n{{content}}".'
    if wrong:
        raise ConfigError(f"template {template!r}", f"there is no field {wrong[0]!r}", fix)
    if "content" not in names:
        raise ConfigError(f"template {template!r}", "it must contain {content}", fix)


def with_composed_content(drafts: Iterable[Draft], template: str) -> Iterator[Draft]:
    """The same drafts, their content replaced by what the template makes of them."""
    for draft in drafts:
        draft.content = composed(draft, template)
        yield draft


def composed(draft: Draft, template: str) -> str:
    """The content that the template makes of a draft."""
    lines = []
    for line in template.split("\n"):
        names = _PLACE.findall(line)
        if not names or any(getattr(draft, name) for name in names):
            lines.append(_PLACE.sub(lambda place: getattr(draft, place[1]), line))
    return "\n".join(lines)
