"""The classes of all verbs: how typer shows their help and answers options that are settings."""

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

TASKS = {
    "Start here": ("quickstart", "config", "doctor"),
    "Data": ("corpus", "tokenizer"),
    "Training": ("train", "launch", "checkpoint", "cluster"),
    "Watching runs": ("board", "plot", "track"),
    "Using the model": ("generate", "export", "evaluate"),
    "Measuring": ("plan", "bench"),
}
"""Panels of `z2all --help` with their verbs, in the order of the work."""


def _without_flag_types(parameters: list[Any]) -> list[Any]:
    """Keep typer from showing `<bool>` after an option that takes no value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


class Verb(TyperCommand):
    """A verb. If it takes overrides, it answers `--steps 5` with `train.steps=5`."""

    def get_params(self, ctx: Any) -> Any:
        return _without_flag_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # By name: newer versions of typer have their own copy of click's exceptions.
            takes_overrides = any(parameter.name == "overrides" for parameter in self.params)
            if type(error).__name__ == "NoSuchOption" and takes_overrides:
                from z2all_ds.base.config.explain import refuse_option

                refuse_option(getattr(error, "option_name", ""), given)
            raise


class VerbGroup(TyperGroup):
    """A group of verbs."""

    def get_params(self, ctx: Any) -> Any:
        return _without_flag_types(super().get_params(ctx))


class VerbsByTask(VerbGroup):
    """All verbs, in panels."""

    def list_commands(self, ctx: Any) -> list[str]:
        panels = {verb: panel for panel, verbs in TASKS.items() for verb in verbs}
        commands: dict[str, Any] = dict(self.commands)
        for name, command in commands.items():
            command.rich_help_panel = panels[name]
        return list(panels)


class Verbs(typer.Typer):
    """A typer app whose verbs are of these classes."""

    def __init__(self, **settings: Any) -> None:
        settings = {"cls": VerbGroup, "context_settings": {"help_option_names": ["-h", "--help"]}, **settings}
        super().__init__(**settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        return super().command(name, **{"cls": Verb, **settings})
