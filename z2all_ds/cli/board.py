"""The verb `z2all board`."""

from typing import Annotated

import typer


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
    host: Annotated[str, typer.Option(help="Address to serve on; any but localhost needs a token.")] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(help="Access token of the page (default: generated if one is needed).")
    ] = None,
) -> None:
    """Serve a live web page of one or more runs: curves, events, health, config differences."""
    from z2all_ds.track.board.serve import serve

    serve(runs, host, port, token)
