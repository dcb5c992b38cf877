"""Starts agents on all nodes over ssh, sends them requests in parallel, and ends them together."""

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from z2all_ds.cluster.nodes import Node
from z2all_ds.cluster.ssh import SSH_FAILED, NoAnswer, ssh_failure, start_module

END_SECONDS = 3.0
AGENT = "z2all_ds.cluster.agents.agent"


class RemoteAgent:
    """The agent of one node. Answers come as futures, which raise NoAnswer."""

    def __init__(self, node: Node, config: Path, folder: str, module: str = AGENT) -> None:
        self.node = node
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._ended: NoAnswer | None = None
        self._process = start_module(node, config, folder, module)
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, method: str, /, **arguments: Any) -> "Future[Any]":
        """Call a method of the agent; return a future of its result."""
        future: Future[Any] = Future()
        with self._lock:
            if self._ended:
                future.set_exception(self._ended)
                return future
            number = len(self._waiting)
            self._waiting[number] = future
        self._process.send({"id": number, "do": method, "with": arguments})
        return future

    def call(self, method: str, seconds: float, /, **arguments: Any) -> Any:
        """Call a method and wait for its result; raise NoAnswer."""
        return wait_for(self.ask(method, **arguments), seconds)

    def close(self) -> None:
        self._process.close(END_SECONDS)

    def _listen(self) -> None:
        while (reply := self._process.receive()) is not None:
            future = self._waiting[reply["id"]]
            if "problem" in reply:
                future.set_exception(NoAnswer("failed", reply["problem"], ""))
            else:
                future.set_result(reply["answer"])
        code, stderr = self._process.wait(), "\n".join(self._process.error_lines)
        with self._lock:
            self._ended = ssh_failure(self.node, stderr) if code == SSH_FAILED else _python_failure(self.node, stderr)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._ended)


def wait_for(future: "Future[Any]", seconds: float) -> Any:
    """Return the result of a request; raise NoAnswer, also after `seconds`."""
    try:
        return future.result(seconds)
    except TimeoutError:
        raise NoAnswer.late(seconds) from None


def wait_for_all(asked: Mapping[str, "Future[Any]"], seconds: float) -> tuple[dict[str, Any], dict[str, NoAnswer]]:
    """Return results and failures of requests to several nodes, by node."""
    deadline = time.monotonic() + seconds
    answers, failures = {}, {}
    for name, future in asked.items():
        try:
            answers[name] = future.result(max(0.0, deadline - time.monotonic()))
        except NoAnswer as failure:
            failures[name] = failure
        except TimeoutError:
            failures[name] = NoAnswer.late(seconds)
    return answers, failures


def _python_failure(node: Node, stderr: str) -> NoAnswer:
    last = stderr.splitlines()[-1] if stderr else "it ended without a message"
    python = node.interpreter
    if "No module named" in stderr:
        return NoAnswer(
            "package missing", last, f"Install z2all_ds for {python} on {node.name}, as on the other nodes."
        )
    if "No such file or directory" in stderr and python in stderr:
        return NoAnswer("python missing", last, f"Install it there, or set `python:` for {node.name} in the hostfile.")
    if "cd: " in stderr:
        return NoAnswer("folder missing", last, "Put the checkout at the same path on every node, or on a shared disk.")
    return NoAnswer("agent", last, f"Run `{python} -m {AGENT}` on {node.name} by hand.")


@contextmanager
def agents_on(nodes: list[Node], config: Path, folder: str, module: str = AGENT) -> Iterator[Mapping[str, RemoteAgent]]:
    """Yield an agent per node, by node name, and end them all."""
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
