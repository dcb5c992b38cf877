"""Runs ranks on all nodes over ssh, one connection per node, and ends all of them when one fails."""

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from z2all_ds.cluster.launch.node import BEAT, BEAT_EVERY_SECONDS, END, FORGET, Orders
from z2all_ds.cluster.nodes import Node
from z2all_ds.cluster.ssh import SSH_FAILED, start_module

MODULE = "z2all_ds.cluster.launch.node"
OTHERS_SECONDS = 3.0
"""After the first failure, time for the other nodes to record their faults before they are ended."""
END_SECONDS = 25.0
"""For a node to end its ranks; then its connection is closed, and it ends them by itself."""
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class NodeEnd:
    """How a launch ended on one node."""

    name: str
    code: int | None
    """Exit code of its launcher; None if the node was lost."""
    last_line: str
    """The last line on stderr, of ssh if the node was lost."""


class RemoteNode:
    """The connection to one node."""

    def __init__(self, node: Node, config: Path, folder: str, orders: Orders) -> None:
        self.name = node.name
        self._connection = start_module(node, config, folder, MODULE, shows_errors=True)
        self._connection.send(asdict(orders))
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    @property
    def is_running(self) -> bool:
        return self._connection.process.poll() is None

    def ask_to_end(self, how: str = END) -> None:
        self._connection.send({"do": how})

    def disconnect(self) -> None:
        self._connection.close()

    def end(self) -> NodeEnd:
        """Return how it ended, after it has."""
        ssh_code, lines, code = self._connection.wait(), self._connection.error_lines, None
        with suppress(TimeoutError):
            code = (self._connection.receive(0.0) or {}).get("code")
        if code is None and ssh_code != SSH_FAILED:
            code = ssh_code or 1
        return NodeEnd(self.name, code, lines[-1] if lines else "")

    def _send_heartbeats(self) -> None:
        while self.is_running:
            time.sleep(BEAT_EVERY_SECONDS)
            self._connection.send({"do": BEAT})


def run_on_nodes(nodes: list[Node], config: Path, folder: str, orders: Mapping[str, Orders]) -> list[NodeEnd]:
    """Run until all nodes have ended; return them in the order of their ends."""
    remotes: list[RemoteNode] = []
    try:
        for node in nodes:
            remotes.append(RemoteNode(node, config, folder, orders[node.name]))
        running, ends = list(remotes), list[NodeEnd]()
        failed_at: float | None = None
        is_asked_to_end = False
        while running:
            for remote in [remote for remote in running if not remote.is_running]:
                running.remove(remote)
                ends.append(remote.end())
                if ends[-1].code != 0:
                    failed_at = failed_at or time.monotonic()
            since = time.monotonic() - failed_at if failed_at else 0.0
            if since > OTHERS_SECONDS and not is_asked_to_end:
                is_asked_to_end = True
                for remote in running:
                    remote.ask_to_end()
            if since > OTHERS_SECONDS + END_SECONDS:
                for remote in running:
                    remote.disconnect()
            time.sleep(POLL_SECONDS)
        return ends
    except KeyboardInterrupt:  # no restart follows: snapshots are deleted, too
        _end_all(remotes, FORGET)
        raise
    finally:
        _end_all(remotes, END)


def _end_all(remotes: list[RemoteNode], how: str) -> None:
    """Ask all nodes to end at once, and wait for them."""
    running = [remote for remote in remotes if remote.is_running]
    for remote in running:
        remote.ask_to_end(how)
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline and any(remote.is_running for remote in running):
        time.sleep(POLL_SECONDS)
    for remote in running:
        if remote.is_running:
            remote.disconnect()
