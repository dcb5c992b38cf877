"""Options that several verbs share, and the refusal of options that would have no effect."""

from collections.abc import Iterable
from typing import Annotated

import typer

from z2all_ds.base.errors import ConfigError


def _complete_setting(incomplete: str) -> list[str]:
    from z2all_ds.base.config import RunConfig
    from z2all_ds.base.config.section_errors import dotted_settings

    return [f"{name}=" for name in dotted_settings(RunConfig) if name.startswith(incomplete)]


ConfigOption = Annotated[str | None, typer.Option("--config", help="Run YAML or preset name.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="section.key=value, overrides the config (see `z2all config --explain`).",
        autocompletion=_complete_setting,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
WorkersOption = Annotated[int | None, typer.Option(help="Worker processes on this machine (default: one per core).")]
FollowLinksOption = Annotated[
    bool,
    typer.Option("--follow-links", help="Also read files that links in the given folders lead to outside of them."),
]


def given(context: typer.Context) -> dict[str, str]:
    """Return the parameters that were given on the command line, with the names that the user knows."""
    found = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            found[parameter.name or ""] = parameter.opts[0]
    return found


def refuse_without_effect(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Raise if one of these parameters was given."""
    wrong = [option for name, option in given(context).items() if name in set(names)]
    if wrong:
        raise ConfigError(", ".join(wrong), f"without effect: {why}", "Leave it out.")
