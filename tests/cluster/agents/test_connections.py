"""Tests of measurements over real sockets."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from z2all_ds.cluster.agents.connections import Listener, measure, source_address

TOKEN = "0123456789abcdef"


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", 0, TOKEN)
    yield listener
    listener.close()


def test_speed_is_measured_in_both_directions(listener: Listener) -> None:
    speed = measure("127.0.0.1", listener.port, TOKEN, 0.05)
    assert speed.latency_us > 0
    assert speed.gigabits_out > 0
    assert speed.gigabits_in > 0


def test_a_wrong_token_is_refused(listener: Listener) -> None:
    with pytest.raises(ConnectionError, match="a different process answers there"):
        measure("127.0.0.1", listener.port, "f" * len(TOKEN), 0.05)
    assert measure("127.0.0.1", listener.port, TOKEN, 0.01).latency_us > 0


def test_an_echo_server_is_not_mistaken_for_the_listener() -> None:
    def echo(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):  # a reset, because the client does not read all data
            while data := connection.recv(1024):
                connection.sendall(data * 4)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=echo, args=(server,), daemon=True).start()
        with pytest.raises(ConnectionError, match="a different process answers there"):
            measure("127.0.0.1", server.getsockname()[1], TOKEN, 0.05)


def test_a_closed_listener_refuses(listener: Listener) -> None:
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        measure("127.0.0.1", listener.port, TOKEN, 0.05)


def test_a_listener_accepts_connections_only_on_its_own_address(listener: Listener) -> None:
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", listener.port), timeout=3):
        pass


def test_the_source_address_towards_this_machine_is_a_loopback_address() -> None:
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert source_address("localhost") in ("127.0.0.1", "::1")
