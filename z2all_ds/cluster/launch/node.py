"""The process on each node during a launch: `python -m z2all_ds.cluster.launch.node`, started over ssh.

The first message on stdin has its orders, so that no environment variable appears on a command line. It runs
DeepSpeed's launcher for this node (`deepspeed --no_ssh --node_rank N`) and ends it with all its processes on request,
when the connection closes, or when the connection is silent for a while. Loads no torch.
"""

import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.atomic import open_own
from z2all_ds.base.child_process import end_group, read_messages, start, write_message
from z2all_ds.base.machine import default_environment, private_temp_dir
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import memory
from z2all_ds.train.processes.local_ranks import RANK_MODULE
from z2all_ds.zero.op_builds import prebuild

BEAT, END, FORGET = "beat", "end", "end and forget"
"""Messages after the orders: a heartbeat; end, but keep the in-memory snapshots for a restart; end and delete them."""
BEAT_EVERY_SECONDS = 2.0
SILENCE_SECONDS = 20.0
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Orders:
    """The instructions for a node."""

    name: str
    node_rank: int
    slots: dict[str, int]
    """Slots of all nodes, in rank order."""
    master_address: str
    """As seen from this node."""
    master_port: int
    environment: dict[str, str]
    arguments: list[str]
    """Arguments of each rank."""
    log: str
    """File for the stdout of the launcher and its ranks."""
    run_dir: str
    ops: list[str]
    """DeepSpeed ops to build here before the ranks start."""


def launcher_command(orders: Orders, hostfile: Path, python: str = sys.executable) -> list[str]:
    """Return the deepspeed command of one node."""
    return [
        *(python, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile)),
        *("--no_ssh", "--node_rank", str(orders.node_rank)),
        *("--master_addr", orders.master_address, "--master_port", str(orders.master_port)),
        *("--log_level", "error", "--module", RANK_MODULE),
        *orders.arguments,
    ]


def hostfile_text(slots: dict[str, int]) -> str:
    """Return the text of DeepSpeed's hostfile."""
    return "".join(f"{name} slots={count}\n" for name, count in slots.items())


class Connection:
    """The connection to the launching machine; `is_open` as long as heartbeats arrive."""

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
    """Run the launcher; return its exit code, or 130 if it was ended from here."""
    connection = Connection()
    environment = {**os.environ, **default_environment(orders.slots[orders.name]), **orders.environment}
    hostfile = private_temp_dir() / f"hostfile_{os.getpid()}"
    hostfile.write_text(hostfile_text(orders.slots), encoding="utf-8")
    log = Path(orders.log)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab", opener=open_own) as file:
            process = start(launcher_command(orders, hostfile), environment, stdout=file)
            try:
                while process.poll() is None and connection.is_open:
                    time.sleep(POLL_SECONDS)
                return 130 if process.returncode is None else process.returncode
            finally:
                end_group(process)
                if connection.asked_to_forget:
                    memory.remove_snapshots(RunFolder(Path(orders.run_dir)))
    finally:
        hostfile.unlink(missing_ok=True)


def main() -> int:
    orders = Orders(**next(read_messages(sys.stdin)))
    prebuild(orders.ops)
    code = run(orders)
    try:
        write_message(sys.stdout, {"code": code})
    except OSError:  # the connection is gone
        os._exit(1)
    return 0 if code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
