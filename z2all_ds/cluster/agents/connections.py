"""Connections between two nodes: whether one reaches the other, with latency and bandwidth.

A listener serves only clients that know its token, and only on its own address. It proves in turn that the token is
its own: private addresses repeat, so a node may reach itself, or a stranger, under the address of another node.
"""

import hashlib
import socket
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

PINGS = 20
PING = b"p" * 8
CHUNK = b"\0" * (256 * 1024)
CONNECT_SECONDS = 3.0
SILENCE_SECONDS = 5.0


class Listener:
    """Answers measurements until it is closed."""

    def __init__(self, address: str, port: int, token: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, port), family=family)
        self._token = token.encode()
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        # Without shutdown a thread inside accept() keeps the port open.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            _prepare(connection)
            if _read(connection, len(self._token)) != self._token:
                return
            connection.sendall(_proof(self._token))
            for _ in range(PINGS + 1):
                connection.sendall(_read(connection, len(PING)))
            seconds = int.from_bytes(_read(connection, 4), "big") / 1000
            # The sender's clock ends the stream, so the receiver computes the speed, from what has arrived.
            received, took = _receive(connection)
            connection.sendall(received.to_bytes(8, "big") + round(took * 1e6).to_bytes(8, "big"))
            _send(connection, seconds)


@dataclass(frozen=True)
class Speed:
    """Latency and bandwidth between two nodes."""

    latency_us: float
    """Median round trip in microseconds."""
    gigabits_out: float
    gigabits_in: float


def measure(address: str, port: int, token: str, seconds: float) -> Speed:
    """Connect to a listener and measure for `seconds` in each direction; raise OSError."""
    with socket.create_connection((address, port), timeout=CONNECT_SECONDS) as connection:
        _prepare(connection)
        _authenticate(connection, token.encode())
        times = []
        for _ in range(PINGS + 1):
            started = time.perf_counter()
            connection.sendall(PING)
            _read(connection, len(PING))
            times.append(time.perf_counter() - started)
        connection.sendall(round(seconds * 1000).to_bytes(4, "big"))
        _send(connection, seconds)
        arrived, took_us = int.from_bytes(_read(connection, 8), "big"), int.from_bytes(_read(connection, 8), "big")
        received, took = _receive(connection)
    latency = statistics.median(times[1:])  # the first one waits for the listener's thread
    return Speed(latency * 1e6, _gigabits(arrived, took_us / 1e6), _gigabits(received, took))


def source_address(towards: str) -> str:
    """Return the address of this machine that packets to `towards` (name or address) carry; send nothing."""
    family, kind, protocol, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(SILENCE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _authenticate(connection: socket.socket, token: bytes) -> None:
    proof = bytearray()
    with suppress(ConnectionError):  # a listener with another token closes the connection
        connection.sendall(token)
        proof = _read(connection, len(_proof(token)))
    if proof != _proof(token):
        raise ConnectionError("a different process answers there")


def _proof(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _gigabits(count: int, seconds: float) -> float:
    return count * 8 / max(seconds, 1e-6) / 1e9


def _send(connection: socket.socket, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        connection.sendall(b"+" + CHUNK)
    connection.sendall(b".")


def _receive(connection: socket.socket) -> tuple[int, float]:
    """Read what `_send` sends; return bytes and seconds."""
    started, count = time.perf_counter(), 0
    while _read(connection, 1) == b"+":
        count += len(_read(connection, len(CHUNK)))
    return count, time.perf_counter() - started


def _read(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    left = memoryview(data)
    while left:
        got = connection.recv_into(left)
        if not got:
            raise ConnectionError("the other side closed the connection")
        left = left[got:]
    return data
