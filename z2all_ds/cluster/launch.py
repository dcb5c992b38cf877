"""Starts the ranks of one machine with the real deepspeed launcher, waits for them, and leaves none behind."""

import os
import sys
from pathlib import Path

from z2all_ds.cluster.group import run_group
from z2all_ds.errors import ClusterError, PortTaken
from z2all_ds.machine import default_environment, free_port

RANK_MODULE = "z2all_ds.train.pretrain"
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
    environment = {**os.environ, **default_environment(ranks)}
    code = 0
    for _ in range(PORT_TRIES):
        code = run_group(local_command(arguments, ranks, free_port()), environment, launcher_log)
        # Somebody took the free port between our look and rank 0's bind: rare, and cured by another port.
        if code != PortTaken.exit_code:
            break
    return code


def check_ranks(ranks: int, gpus: int) -> None:
    """One rank a GPU; NCCL does not put two on one."""
    if ranks < 1 or (gpus and ranks > gpus):
        raise ClusterError(
            f"ranks={ranks}",
            f"must be 1 to {gpus}, one for each GPU" if gpus else "must be at least 1",
            "Set --ranks, or DS_ACCELERATOR=cpu to train on the CPU.",
        )
