"""Settings of `z2all evaluate harness`, checked before anything is loaded."""

from dataclasses import dataclass

from z2all_ds.base.errors import ConfigError
from z2all_ds.evaluate.harness.questions import RESHAPINGS


@dataclass(frozen=True)
class HarnessSettings:
    """The options of the command line."""

    tasks: tuple[str, ...]
    include: str | None = None
    shots: int | None = None
    limit: int | None = None
    batch: int = 8
    reshape: tuple[str, ...] = ()
    shuffles: int = 3
    seed: int = 1234
    chat: bool = False
    fields: str | None = None
    others_wrong_text: str | None = None
    allow_task_code: bool = False
    """Run Python code of the folder of tasks."""

    def __post_init__(self) -> None:
        for name, least in (("shots", 0), ("limit", 1), ("batch", 1), ("shuffles", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name} {value}", f"must be at least {least}", "Use a larger number.")
        _ = self.field_names

    @property
    def field_names(self) -> dict[str, str]:
        """The parts of `fields`, such as `question=q,options=o1|o2|o3,answer=a`; any of the three may be omitted."""
        names = {}
        for part in filter(str.strip, (self.fields or "").split(",")):
            key, _, name = (piece.strip() for piece in part.partition("="))
            if key not in ("question", "options", "answer") or not name:
                raise ConfigError(
                    f"--fields {self.fields}",
                    f"{part.strip()!r} is none of question=NAME, options=NAME (or options=NAME|NAME|...), answer=NAME",
                    "Set the field names of the task's documents in this format.",
                )
            names[key] = name
        return names


def parse_reshapings(text: str) -> tuple[str, ...]:
    """Parse `all`, `none`, or comma-separated names."""
    if text in ("all", "none", ""):
        return RESHAPINGS if text == "all" else ()
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in RESHAPINGS:
            raise ConfigError(f"--reshape {name}", "no such reshaping", f"Known: {', '.join(RESHAPINGS)}, all.")
    return names
