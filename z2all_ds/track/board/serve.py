"""`z2all board`: finds a port, prints the address, and serves until Ctrl-C."""

import ipaddress
import os
import secrets
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from urllib.parse import quote

from z2all_ds.base.console import say
from z2all_ds.base.errors import ConfigError, MachineError

DEFAULT_PORT, PORTS_TRIED = 8765, 50
BACKLOG = 64
"""Connections that are accepted at once, before any of them is counted."""
REQUIRED = ("starlette", "uvicorn", "plotly")
TOKEN_VARIABLE = "Z2ALL_BOARD_TOKEN"


def serve(runs: Sequence[str], host: str, port: int | None) -> None:
    """Serve the board until it is interrupted. `port` None: the default one, or the next free one."""
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        raise MachineError(f"{', '.join(missing)}", "not installed", "Run: pip install 'z2all_ds[board]'")
    token = chosen_token()
    listening = bind(host, port)
    bound_port = listening.getsockname()[1]

    from z2all_ds.track.board.watch import Watch

    watch = Watch(runs)
    try:
        watch.start()
        # After reading has begun, since loading the server's libraries takes a while.
        import uvicorn

        from z2all_ds.track.board.connections import LimitedConnection
        from z2all_ds.track.board.server import make_app

        config = uvicorn.Config(
            make_app(watch, token, bound_port),
            http=LimitedConnection,
            ws="none",
            backlog=BACKLOG,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            server_header=False,
        )
        tunnel = f" (ssh -L {bound_port}:127.0.0.1:{bound_port} HOST from elsewhere)" if is_loopback(host) else ""
        say(f"board: {address(host, bound_port, token)}{tunnel}")
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        watch.stop()
        listening.close()


def chosen_token() -> str:
    """Return the token of the environment, or a new one."""
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None:
        return secrets.token_urlsafe(16)
    if not token or not token.isprintable():  # surrogates are not printable
        rule = "must be text without control characters" if token else "must not be empty"
        raise ConfigError(TOKEN_VARIABLE, rule, "Unset it to generate one.")
    return token


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address(host: str, port: int, token: str) -> str:
    """Return the page's URL."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={quote(token, safe='')}"


def bind(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens on `port`; if None, on the first free one from DEFAULT_PORT."""
    try:
        family, _, _, _, found = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}", f"{error.strerror or error}", "Give an address of this machine.") from None
    ports = [port] if port is not None else range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED)
    for candidate in ports:
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((found[0], candidate))
            listening.listen()  # two sockets can be bound to a port, but only one can listen
        except OSError as error:
            listening.close()
            problem = error
        else:
            return listening
    which = f"--port {port}" if port is not None else f"ports {DEFAULT_PORT} to {DEFAULT_PORT + PORTS_TRIED - 1}"
    raise MachineError(f"{which} on {host}", f"{problem.strerror}", "Give another --port or --host.")
