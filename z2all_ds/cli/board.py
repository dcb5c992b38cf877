"""The verb `z2all board`."""

from typing import Annotated

import typer


def board(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Run folders, folders of run folders, or such on another machine: user@host:path, "
            "ssh://user@host:port/path.",
            metavar="RUN...",
        ),
    ],
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Default: 8765, or the next that is free.")] = None,
    host: Annotated[str, typer.Option(help="Address to serve on; all but this machine's own need a token.")] = (
        "127.0.0.1"
    ),
    token: Annotated[
        str | None, typer.Option(help="Who opens the page must know it (default: made where one is needed).")
    ] = None,
) -> None:
    """A live web page of one run or many side by side: curves, events, health, config differences."""
    from z2all_ds.track.board.serve import serve

    serve(runs, host, port, token)
