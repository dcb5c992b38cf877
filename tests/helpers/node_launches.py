"""Runs of `z2all launch` on a node of a lab, as a user would start them there."""

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.node_lab import SSH_PORT, Node
from tests.helpers.training import metrics

GONE_SECONDS = 40.0
STEPS_SECONDS = 240.0


def write_hostfile(path: Path, nodes: list[Node], slots: int = 1) -> Path:
    lines = [f"all: {{slots: {slots}, ssh: {{port: {SSH_PORT}}}}}", "nodes:", *(f"  {node.name}:" for node in nodes)]
    path.write_text("\n".join(lines) + "\n")
    return path


class NodeLaunch:
    """A running launch, whose output is collected by a thread."""

    def __init__(self, node: Node, *words: str, within: Sequence[str] = ()) -> None:
        """Start `z2all` with these words; `within` precedes the command, for example salloc and its options."""
        command = node.command(*within, sys.executable, "-m", "z2all_ds", *words)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self._lines.extend(self.process.stdout)

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def wait(self) -> int:
        code = self.process.wait()
        self._reader.join()
        return code

    def wait_for_steps(self, run_dir: Path, number: int) -> None:
        """Wait until the metrics contain `number` steps."""
        deadline = time.monotonic() + STEPS_SECONDS
        while not (run_dir / "metrics.jsonl").exists() or len(metrics(run_dir)) < number:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def wait_for_words(self, words: str) -> None:
        deadline = time.monotonic() + STEPS_SECONDS
        while words not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)


def rank_on(node: Node) -> int:
    """Return the pid of the only rank on a node, as seen from outside the node."""
    found = [pid for pid, command in node.processes(" -m z2all_ds.train.pretrain").items() if "launcher" not in command]
    assert len(found) == 1, found
    return found[0]


def assert_nothing_is_left(nodes: list[Node], within_seconds: float = GONE_SECONDS) -> None:
    deadline = time.monotonic() + within_seconds
    while True:
        left = {node.name: found for node in nodes if node.process and (found := _ours(node))}
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _ours(node: Node) -> dict[int, str]:
    return {**node.processes("z2all_ds"), **node.processes("deepspeed"), **node.processes("/launch/rank.py")}
