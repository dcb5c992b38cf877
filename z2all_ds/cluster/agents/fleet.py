"""Agents on all nodes at once: started over ssh, asked side by side, ended together."""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from z2all_ds.cluster.nodes import Node
from z2all_ds.cluster.ssh import SSH_FAILED, Trouble, start_module, trouble_of

END_SECONDS = 3.0
AGENT = "z2all_ds.cluster.agents.agent"
"""The module that looks at nodes; others may be run in its place."""


class NoAnswer(Exception):
    """A node that could not be entered, or whose agent ended or failed; `trouble` says why."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.said)
        self.trouble = trouble

    @classmethod
    def late(cls, seconds: float) -> "NoAnswer":
        return cls(Trouble("late", f"no answer within {seconds:.0f} s", "Look at it: it is stuck, or its disk is."))


class RemoteAgent:
    """One node's agent. Questions may be asked at any time; answers come as futures."""

    def __init__(self, node: Node, config: Path, folder: str, module: str = AGENT) -> None:
        self.node = node
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._ended: Trouble | None = None
        self._process = start_module(node, config, folder, module)
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, what: str, **details: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        with self._lock:
            if self._ended:
                future.set_exception(NoAnswer(self._ended))
                return future
            number = len(self._waiting)
            self._waiting[number] = future
        self._process.send({"id": number, "do": what, "with": details})
        return future

    def close(self) -> None:
        self._process.close(END_SECONDS)

    def _listen(self) -> None:
        while (reply := self._process.receive()) is not None:
            future = self._waiting[reply["id"]]
            if "problem" in reply:
                future.set_exception(NoAnswer(Trouble("failed", reply["problem"], "")))
            else:
                future.set_result(reply["answer"])
        code, said = self._process.wait(), "\n".join(self._process.error_lines)
        with self._lock:
            self._ended = trouble_of(self.node, said) if code == SSH_FAILED else _trouble_of_python(self.node, said)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(NoAnswer(self._ended))


def _trouble_of_python(node: Node, said: str) -> Trouble:
    last = said.splitlines()[-1] if said else "it ended without a word"
    python = node.interpreter
    if "No module named" in said:
        return Trouble("package", last, f"Install z2all_ds for {python} on {node.name}, as on the other nodes.")
    if "No such file or directory" in said and python in said:
        return Trouble("python", last, f"Make it there, or set `python:` for {node.name} in the hostfile.")
    if "cd: " in said:
        return Trouble("folder", last, "Have the checkout at the same path on every node, or on a shared disk.")
    return Trouble("agent", last, f"Run `{python} -m z2all_ds.cluster.agents.agent` on {node.name} by hand.")


@contextmanager
def agents_on(nodes: list[Node], config: Path, folder: str, module: str = AGENT) -> Iterator[Mapping[str, RemoteAgent]]:
    """One on each node, by its name; none is left when this ends."""
    agents: dict[str, RemoteAgent] = {}
    try:
        for node in nodes:
            agents[node.name] = RemoteAgent(node, config, folder, module)
        yield agents
    finally:
        closing = [threading.Thread(target=agent.close) for agent in agents.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
