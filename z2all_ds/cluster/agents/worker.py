"""A process that a node's agent holds for the health test: orders go to its stdin, answers come from its stdout.

It may load torch, which the agent must not. It is gone when the agent ends: the agent kills it, and should the agent be
killed itself, the process notices (`base/parent_watch.py`).
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from z2all_ds.base.parent_watch import OWNER_VARIABLE, owner_mark

MARK = "z2all-worker: "
LINES_KEPT = 40


class Worker:
    """`python -m module`, one order at a time."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._replies: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._said: deque[str] = deque(maxlen=LINES_KEPT)
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **environment, OWNER_VARIABLE: owner_mark()},
            start_new_session=True,
        )
        self._listeners = [threading.Thread(target=each, daemon=True) for each in (self._answers, self._complaints)]
        for thread in self._listeners:
            thread.start()

    def ask(self, order: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Its `answer`, or a `problem`: with `ended` where the process is gone, with `late` where it was too slow."""
        with self._lock:
            assert self._process.stdin is not None
            with suppress(OSError):  # it has ended, which the queue tells too
                self._process.stdin.write(json.dumps(order) + "\n")
                self._process.stdin.flush()
            try:
                reply = self._replies.get(timeout=seconds)
            except queue.Empty:
                self.end()  # a late answer must not be taken for that of the next order
                return {"problem": f"not done within {seconds:.0f} s", "late": True}
            if reply is None:
                self._replies.put(None)  # for whoever asks next
                return {"problem": self._last_words(), "ended": True}
            return reply

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()  # there is nothing that it could save
            self._process.wait()

    def _answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            before, mark, text = line.partition(MARK)
            if mark and not before:
                self._replies.put(json.loads(text))
        self._replies.put(None)

    def _complaints(self) -> None:
        assert self._process.stderr is not None
        self._said.extend(line.strip() for line in self._process.stderr if line.strip())

    def _last_words(self) -> str:
        code = self._process.wait()
        self._listeners[1].join(1.0)
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"{how} ({self._said[-1]})" if self._said and code >= 0 else how
