"""Runs ranks on all nodes over ssh, one connection each, and ends all of them when one has failed."""

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
"""After the first node has ended badly, the others get so long to say why before they are ended."""
END_SECONDS = 25.0
"""For a node to end its ranks; then its connection is cut, and it ends them by itself."""
LOOK_EVERY_SECONDS = 0.1


@dataclass(frozen=True)
class NodeEnd:
    """How it ended on one node."""

    name: str
    code: int | None
    """Of its launcher; None where the node was lost."""
    said: str
    """What ssh said, where it was lost."""
    after_seconds: float

    @property
    def is_lost(self) -> bool:
        return self.code is None


class RemoteNode:
    """One connection."""

    def __init__(self, node: Node, config: Path, folder: str, orders: Orders) -> None:
        self.node = node
        self.code: int | None = None
        self._started = time.monotonic()
        self.ended_at: float | None = None
        self._connection = start_module(node, config, folder, MODULE, shows_errors=True)
        self._connection.send(asdict(orders))
        threading.Thread(target=self._beat, daemon=True).start()

    @property
    def is_running(self) -> bool:
        if self._connection.process.poll() is None:
            return True
        if self.ended_at is None:
            self._connection.wait()
            with suppress(TimeoutError):
                self.code = (self._connection.receive(0.0) or {}).get("code")
            self.ended_at = time.monotonic()
        return False

    def ask_to_end(self, how: str = END) -> None:
        self._connection.send({"do": how})

    def cut(self) -> None:
        self._connection.close()

    def end(self) -> NodeEnd:
        ssh_code, lines = self._connection.process.returncode, self._connection.error_lines
        lost = self.code is None and ssh_code == SSH_FAILED
        code = None if lost else (self.code if self.code is not None else ssh_code or 1)
        seconds = (self.ended_at or time.monotonic()) - self._started
        return NodeEnd(self.node.name, code, lines[-1] if lines else "", seconds)

    def _beat(self) -> None:
        while self._connection.process.poll() is None:
            time.sleep(BEAT_EVERY_SECONDS)
            self._connection.send({"do": BEAT})


def run_on_nodes(nodes: list[Node], config: Path, folder: str, orders: Mapping[str, Orders]) -> list[NodeEnd]:
    """Until all have ended; in the order in which they did."""
    running: list[RemoteNode] = []
    try:
        for node in nodes:
            running.append(RemoteNode(node, config, folder, orders[node.name]))
        waiting, ended = list(running), list[RemoteNode]()
        failed_at: float | None = None
        asked = False
        while waiting:
            for remote in [remote for remote in waiting if not remote.is_running]:
                waiting.remove(remote)
                ended.append(remote)
                if remote.end().code != 0:
                    failed_at = failed_at or time.monotonic()
            since = time.monotonic() - failed_at if failed_at else 0.0
            if since > OTHERS_SECONDS and not asked:
                asked = True
                for remote in waiting:
                    remote.ask_to_end()
            if since > OTHERS_SECONDS + END_SECONDS:
                for remote in waiting:
                    remote.cut()
            time.sleep(LOOK_EVERY_SECONDS)
        return [remote.end() for remote in ended]
    except KeyboardInterrupt:  # ended by hand, not by a fault: nothing is left behind
        _end_all(running, FORGET)
        raise
    finally:
        _end_all(running, END)


def _end_all(remotes: list[RemoteNode], how: str) -> None:
    """All nodes are told at once, and waited for."""
    left = [remote for remote in remotes if remote.is_running]
    for remote in left:
        remote.ask_to_end(how)
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline and any(remote.is_running for remote in left):
        time.sleep(LOOK_EVERY_SECONDS)
    for remote in left:
        if remote.is_running:
            remote.cut()
