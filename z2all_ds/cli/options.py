"""Options that several verbs have."""

from typing import Annotated

import typer

ConfigOption = Annotated[str | None, typer.Option("--config", help="Run YAML, or the name of a preset.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value, over everything in the config.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
WorkersOption = Annotated[int | None, typer.Option(help="Processes on this machine (default: one a core).")]
