"""Runs on a node while it is looked at: `python -m z2all_ds.cluster.agents.agent`, started over ssh by `fleet.py`.

Requests come on stdin, answers go to stdout, as messages of `base/child_process.py`. It ends with the connection. Loads
no torch.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from z2all_ds.base.child_process import read_messages, write_message
from z2all_ds.cluster.agents import facts
from z2all_ds.cluster.agents.connections import Listener, measure, source_address
from z2all_ds.cluster.agents.worker import Worker


class Answers:
    """Of an agent: one method a question."""

    def end(self) -> None:
        """The connection is closed."""


class Agent(Answers):
    """What can be asked before a launch."""

    def __init__(self) -> None:
        self._listeners: dict[int, Listener] = {}
        self._worker: Worker | None = None

    def hello(self) -> dict[str, Any]:
        return {"time_unix": time.time()}

    def facts(self, run_dir: str, files: list[str]) -> dict[str, Any]:
        return facts.gather(run_dir, files)

    def source_address(self, towards: str) -> str:
        return source_address(towards)

    def listen(self, address: str, port: int, token: str) -> int:
        """The port it listens on; 0 lets the system choose."""
        listener = Listener(address, port, token)
        self._listeners[listener.port] = listener
        return listener.port

    def close(self, port: int) -> None:
        self._listeners.pop(port).close()

    def measure(self, address: str, port: int, token: str, seconds: float) -> dict[str, float]:
        return asdict(measure(address, port, token, seconds))

    def leave_mark(self, folder: str, name: str) -> None:
        """A file for the others to see."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / name).touch()

    def sees_mark(self, folder: str, name: str) -> bool:
        # A fresh look into the folder: NFS remembers for a while that a name was not there.
        return name in os.listdir(folder) if Path(folder).is_dir() else False

    def remove_mark(self, folder: str, name: str) -> None:
        (Path(folder) / name).unlink(missing_ok=True)

    def start_worker(self, module: str, environment: dict[str, str]) -> None:
        """A process beside this one, which loads what the agent does not."""
        self.end()
        self._worker = Worker(module, environment)

    def work(self, order: dict[str, Any], seconds: float) -> dict[str, Any]:
        if self._worker is None:
            raise RuntimeError("no worker was started")
        return self._worker.ask(order, seconds)

    def end(self) -> None:
        """Nothing that was started here is left."""
        if self._worker is not None:
            self._worker.end()


def serve(agent: Answers) -> None:
    """Answers with the agent's methods until the connection ends."""
    speaking = threading.Lock()

    def answer(request: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"id": request["id"]}
        try:
            question: Callable[..., Any] = getattr(agent, request["do"])
            reply["answer"] = question(**request["with"])
        except Exception as error:  # whatever it is, it is the answer
            reply["problem"] = f"{getattr(error, 'strerror', None) or error}" or type(error).__name__
        with speaking:
            write_message(sys.stdout, reply)

    try:
        for request in read_messages(sys.stdin):
            threading.Thread(target=answer, args=(request,), daemon=True).start()
    finally:
        agent.end()


if __name__ == "__main__":
    serve(Agent())
