"""Starts the ranks of one machine with the real deepspeed launcher, waits for them, and leaves none behind.

The ranks get their own session, so that Ctrl-C reaches only us; we then end the whole group in order. Should we be
killed outright, the ranks end by themselves (see lifeline.py).
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from z2all_ds.cluster.lifeline import OWNER_VARIABLE, owner_mark
from z2all_ds.errors import ClusterError
from z2all_ds.machine import default_environment, free_port, group_is_alive

RANK_MODULE = "z2all_ds.train.pretrain"
GRACE_SECONDS = 8.0
"""Between the polite signal and the last one, and at most so long again for the last one to work."""
PORT_TRIES = 3


def local_command(arguments: list[str], ranks: int, port: int) -> list[str]:
    """The launcher's command line. `python -m` rather than the `deepspeed` script: no PATH, and no trouble with
    blanks or long paths in the script's first line."""
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        # A file that cannot exist: on docker nodes the launcher's default, /job/hostfile, often does.
        *("--hostfile", os.devnull + "/none", "--num_gpus", str(ranks), "--master_port", str(port)),
        *("--log_level", "error", "--module", RANK_MODULE),
        *arguments,
    ]


def run_local_ranks(arguments: list[str], ranks: int, launcher_log: Path) -> int:
    """Runs training to its end and returns the launcher's exit code. The launcher's own words go to `launcher_log`."""
    environment = {**os.environ, **default_environment(ranks), OWNER_VARIABLE: owner_mark()}
    launcher_log.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, PORT_TRIES + 1):
        with launcher_log.open("wb") as log:
            command = local_command(arguments, ranks, free_port())
            process = subprocess.Popen(command, env=environment, stdout=log, start_new_session=True)
            try:
                code = process.wait()
            finally:
                end_group(process)
        # Somebody took the free port between our look and the launcher's bind: rare, and cured by another port.
        if code == 0 or attempt == PORT_TRIES or "EADDRINUSE" not in launcher_log.read_text(errors="replace"):
            return code
    raise AssertionError("unreachable")


def end_group(process: subprocess.Popen[bytes]) -> None:
    """No process of the launcher's session is left when this returns; a second Ctrl-C makes it immediate."""
    try:
        _end_with(process.pid, signal.SIGTERM)
    finally:
        _end_with(process.pid, signal.SIGKILL)
        process.wait()


def _end_with(group: int, number: signal.Signals) -> None:
    """Sends the signal and waits for its effect: even after SIGKILL a process lives on for some milliseconds."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)
    deadline = time.monotonic() + GRACE_SECONDS
    while group_is_alive(group) and time.monotonic() < deadline:
        time.sleep(0.02)


def check_ranks(ranks: int, gpus: int) -> None:
    """One rank a GPU; NCCL does not put two on one."""
    if ranks < 1 or (gpus and ranks > gpus):
        raise ClusterError(
            f"ranks={ranks}",
            f"must be 1 to {gpus}, one for each GPU" if gpus else "must be at least 1",
            "Set --ranks, or DS_ACCELERATOR=cpu to train on the CPU.",
        )
