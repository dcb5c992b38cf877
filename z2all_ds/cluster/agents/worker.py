"""A process that a node's agent holds for the health test.

It may load torch, which the agent must not. It ends with the agent: the agent kills it, and where the agent is killed
itself, the process notices (`base/parent_watch.py`).
"""

import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

from z2all_ds.base.child_process import JsonProcess, module_command


class Worker:
    """`python -m module`, which answers one order at a time."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._process = JsonProcess(module_command(module), {**os.environ, **environment})

    def ask(self, order: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Returns its `answer`, or a `problem`: with `ended` where the process is gone, with `late` where it was too
        slow."""
        with self._lock:
            self._process.send(order)
            try:
                reply = self._process.receive(seconds)
            except TimeoutError:
                self.end()  # the next order must not get the late answer
                return {"problem": f"not done within {seconds:.0f} s", "late": True}
            return {"problem": self._how_it_ended(), "ended": True} if reply is None else reply

    def end(self) -> None:
        self._process.close()  # it has nothing to save

    def _how_it_ended(self) -> str:
        code, lines = self._process.wait(), self._process.error_lines
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"{how} ({lines[-1]})" if lines and code >= 0 else how
