"""`z2all board`: finds a port, says where the board is, and serves until Ctrl-C."""

import secrets
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from urllib.parse import quote

from z2all_ds.base.console import say
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.track.board.hosts import is_loopback

DEFAULT_PORT, PORTS_TRIED = 8765, 50
NEEDED = ("starlette", "uvicorn", "plotly")


def serve(places: Sequence[str], host: str, port: int | None, token: str | None) -> None:
    """`port` None: the default one, or the next that is free. Returns when it is told to stop."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise MachineError(f"{', '.join(missing)}", "not installed here", "Run: pip install 'z2all_ds[board]'")
    if token is not None and not token:
        raise ConfigError("--token", "must not be empty", "Leave it out to have one made.")
    if token is not None and not token.isprintable():  # also bytes that are no text
        raise ConfigError("--token", "must be text without control characters", "Leave it out to have one made.")
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(16)
    listening = bind(host, port)
    bound_port = listening.getsockname()[1]

    # Reading begins before the server's libraries are loaded.
    from z2all_ds.track.board.watch import Watch

    watch = Watch(places)
    try:
        watch.start()
        _run(watch, listening, token, bound_port, said_at(host, bound_port, token))
    finally:
        watch.stop()
        listening.close()


def _run(watch: object, listening: socket.socket, token: str | None, port: int, address: str) -> None:
    import uvicorn

    from z2all_ds.track.board.server import make_app
    from z2all_ds.track.board.watch import Watch

    assert isinstance(watch, Watch)
    config = uvicorn.Config(
        make_app(watch, token, port),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        server_header=False,
    )
    say(address)
    uvicorn.Server(config).run(sockets=[listening])


def said_at(host: str, port: int, token: str | None) -> str:
    """One line for people."""
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if token is not None:
        address += f"/?token={quote(token, safe='')}"
    if is_loopback(host):
        return f"board: {address} (ssh -L {port}:127.0.0.1:{port} HOST from elsewhere)"
    return f"board: {address}"


def bind(host: str, port: int | None) -> socket.socket:
    """A socket that listens on that port; without one, on the first free from the default on."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}", f"{error.strerror or error}", "Give an address of this machine.") from None
    ports = [port] if port is not None else range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED)
    for candidate in ports:
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((address[0], candidate))
            listening.listen()  # two may be bound to a port, one can listen there
        except OSError as error:
            listening.close()
            problem = error
        else:
            return listening
    which = f"--port {port}" if port is not None else f"ports {DEFAULT_PORT} to {DEFAULT_PORT + PORTS_TRIED - 1}"
    raise MachineError(f"{which} on {host}", f"{problem.strerror}", "Give another --port, or another --host.")
