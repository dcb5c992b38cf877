"""Runs on each node for as long as a launch lasts: `python -m z2all_ds.cluster.launch.node`, started over ssh.

The first message on stdin has its orders, so that no setting of the environment ever stands on a command line. It then
runs the real deepspeed launcher of this node (`deepspeed --no_ssh --node_rank N`) and looks after it: whatever happens,
no process of it is left when this ends. It ends the launcher when it is told to, when the connection to whoever ordered
it closes, or when nothing has come over it for a while. Loads no torch.
"""

import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.child_process import end_group, read_messages, start, write_message
from z2all_ds.base.machine import default_environment, private_temp_dir
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import memory
from z2all_ds.train.processes.local_ranks import RANK_MODULE

BEAT, END, FORGET = "beat", "end", "end and forget"
"""Signs of life; an end after which others may go on from the snapshots in this node's memory; one for good."""
BEAT_EVERY_SECONDS = 2.0
SILENCE_SECONDS = 20.0
LOOK_EVERY_SECONDS = 0.1


@dataclass(frozen=True)
class Orders:
    """All that a node has to know."""

    name: str
    node_rank: int
    slots: dict[str, int]
    """Of all nodes, in the order of their ranks."""
    master_address: str
    """As this node reaches it."""
    master_port: int
    environment: dict[str, str]
    arguments: list[str]
    """Of each rank."""
    log: str
    """Where what the launcher and its ranks print on stdout goes."""
    run_dir: str
    ops: list[str]
    """Of DeepSpeed, to be built here before the ranks start."""


def launcher_command(orders: Orders, hostfile: Path, python: str = sys.executable) -> list[str]:
    """The plain deepspeed command of one node."""
    return [
        *(python, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile)),
        *("--no_ssh", "--node_rank", str(orders.node_rank)),
        *("--master_addr", orders.master_address, "--master_port", str(orders.master_port)),
        *("--log_level", "error", "--module", RANK_MODULE),
        *orders.arguments,
    ]


def hostfile_text(slots: dict[str, int]) -> str:
    """As DeepSpeed reads it."""
    return "".join(f"{name} slots={count}\n" for name, count in slots.items())


class Connection:
    """To whoever gave the orders; `is_open` as long as something comes over it."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._asked_to_end = False
        self.asked_to_forget = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for message in read_messages(sys.stdin):
            self._last = time.monotonic()
            if message["do"] in (END, FORGET):
                self.asked_to_forget = message["do"] == FORGET
                break
        self._asked_to_end = True

    @property
    def is_open(self) -> bool:
        return not self._asked_to_end and time.monotonic() - self._last < SILENCE_SECONDS


def run(orders: Orders) -> int:
    """The launcher's exit code, or 130 where it was ended from here."""
    connection = Connection()
    environment = {**os.environ, **default_environment(orders.slots[orders.name]), **orders.environment}
    hostfile = private_temp_dir() / f"hostfile_{os.getpid()}"
    hostfile.write_text(hostfile_text(orders.slots), encoding="utf-8")
    log = Path(orders.log)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            process = start(launcher_command(orders, hostfile), environment, stdout=file)
            try:
                while process.poll() is None and connection.is_open:
                    time.sleep(LOOK_EVERY_SECONDS)
                return 130 if process.returncode is None else process.returncode
            finally:
                end_group(process)
                if connection.asked_to_forget:
                    memory.remove_snapshots(RunFolder(Path(orders.run_dir)))
    finally:
        hostfile.unlink(missing_ok=True)


def build_ops(ops: list[str]) -> None:
    """Once, before the ranks of this node start, with its progress on the terminal."""
    if ops:
        from z2all_ds.zero.op_builds import prebuild

        prebuild(ops)


def main() -> int:
    orders = Orders(**next(read_messages(sys.stdin)))
    build_ops(orders.ops)
    code = run(orders)
    try:
        write_message(sys.stdout, {"code": code})
    except OSError:  # the connection is gone
        os._exit(1)
    return 0 if code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
