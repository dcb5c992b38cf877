"""The verb `z2all board`."""

from typing import Annotated

import typer

from z2all_ds.base.errors import ConfigError


def board(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Run folders or folders of run folders, here or on another machine: user@host:path, "
            "ssh://user@host:port/path.",
            metavar="RUN...",
        ),
    ],
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port (default: 8765, or the next free one).")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    token: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve a live web page of one or more runs: curves, events, health, config differences.

    The printed address contains an access token: that of the environment variable Z2ALL_BOARD_TOKEN, or a new one.
    """
    from z2all_ds.track.board.serve import TOKEN_VARIABLE, serve

    if token is not None:
        rule = "command lines are visible to all users of a machine"
        raise ConfigError("--token", rule, f"Set the environment variable {TOKEN_VARIABLE}, or leave it out.")
    serve(runs, host, port)
