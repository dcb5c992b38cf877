"""The agent of a node during preflight: `python -m z2all_ds.cluster.agents.agent`, started over ssh by `fleet.py`.

Reads requests from stdin and writes answers to stdout, as messages of `base/child_process.py`. Ends with the
connection. Loads no torch.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from z2all_ds.base.child_process import JsonProcess, module_command, read_messages, write_message
from z2all_ds.cluster.agents import connections
from z2all_ds.cluster.agents.connections import Listener
from z2all_ds.cluster.agents.facts import gather

END_SECONDS = 5.0
"""Longest wait at the end for an answer that is being written."""


class Worker:
    """A child process `python -m module` that carries out one order at a time.

    It may load torch, which the agent must not. The agent kills it; if the agent is killed, it ends by itself
    (`base/parent_watch.py`).
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._process = JsonProcess(module_command(module), {**os.environ, **environment})

    def ask(self, order: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return its `answer` or a `problem`; with `ended` if the process has ended, `late` if it was too slow."""
        with self._lock:
            self._process.send(order)
            try:
                reply = self._process.receive(seconds)
            except TimeoutError:
                self.end()  # the next order must not get the late answer
                return {"problem": f"not done within {seconds:.0f} s", "late": True}
            return {"problem": self._how_it_ended(), "ended": True} if reply is None else reply

    def end(self) -> None:
        self._process.close()

    def _how_it_ended(self) -> str:
        code, lines = self._process.wait(), self._process.error_lines
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"{how} ({lines[-1]})" if lines and code >= 0 else how


class Agent:
    """The requests of a preflight, one method each."""

    facts = staticmethod(gather)
    source_address = staticmethod(connections.source_address)

    def __init__(self) -> None:
        self._listeners: dict[int, Listener] = {}
        self._worker: Worker | None = None

    def time_unix(self) -> float:
        return time.time()

    def listen(self, address: str, port: int, token: str) -> int:
        """Open a listener and return its port; 0 lets the system choose."""
        listener = Listener(address, port, token)
        self._listeners[listener.port] = listener
        return listener.port

    def close(self, port: int) -> None:
        self._listeners.pop(port).close()

    def measure(self, address: str, port: int, token: str, seconds: float) -> dict[str, float]:
        return asdict(connections.measure(address, port, token, seconds))

    def create_marker(self, folder: str, name: str) -> None:
        """Create an empty file for the other nodes to see."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / name).touch()

    def sees_marker(self, folder: str, name: str) -> bool:
        # Lists the folder: NFS caches for a while that a name did not exist.
        return name in os.listdir(folder) if Path(folder).is_dir() else False

    def remove_marker(self, folder: str, name: str) -> None:
        (Path(folder) / name).unlink(missing_ok=True)

    def start_worker(self, module: str, environment: dict[str, str]) -> None:
        self.end()
        self._worker = Worker(module, environment)

    def work(self, order: dict[str, Any], seconds: float) -> dict[str, Any]:
        if self._worker is None:
            raise RuntimeError("no worker was started")
        return self._worker.ask(order, seconds)

    def end(self) -> None:
        if self._worker is not None:
            self._worker.end()


def serve(agent: object) -> None:
    """Answer requests with the agent's methods until the connection ends."""
    writing = threading.Lock()

    def answer(request: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"id": request["id"]}
        try:
            reply["answer"] = getattr(agent, request["do"])(**request["with"])
        except Exception as error:  # reported to the caller
            reply["problem"] = f"{getattr(error, 'strerror', None) or error}" or type(error).__name__
        with writing:
            write_message(sys.stdout, reply)

    for request in read_messages(sys.stdin):
        threading.Thread(target=answer, args=(request,), daemon=True).start()
    # Kept from now on: Python aborts if a thread is writing to stdout while it exits.
    writing.acquire(timeout=END_SECONDS)


if __name__ == "__main__":
    agent = Agent()
    try:
        serve(agent)
    finally:
        agent.end()
