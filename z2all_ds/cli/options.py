"""Options that several verbs share."""

from typing import Annotated

import typer

ConfigOption = Annotated[str | None, typer.Option("--config", help="Run YAML or preset name.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value, overrides the config.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
WorkersOption = Annotated[int | None, typer.Option(help="Worker processes on this machine (default: one per core).")]
