"""Starts the ranks of one machine, waits for them, and leaves none behind."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from z2all_ds.base.atomic import write_whole
from z2all_ds.base.child_process import run_group
from z2all_ds.base.config import RunConfig, dump_yaml
from z2all_ds.base.errors import ClusterError, PortTaken
from z2all_ds.base.machine import default_environment, free_port
from z2all_ds.base.run_folder import RunFolder

RANK_MODULE = "z2all_ds.train.pretrain"
PORT_TRIES = 3

LocalCommand = Callable[[list[str], int, int], list[str]]
"""What starts the ranks: from a rank's arguments, the number of ranks and a port."""


def local_command(arguments: list[str], ranks: int, port: int, module: str = RANK_MODULE) -> list[str]:
    """By our own starter, which loads nothing before the ranks do."""
    return [sys.executable, "-m", "z2all_ds.train.processes.starter", str(ranks), str(port), module, *arguments]


def deepspeed_command(arguments: list[str], ranks: int, port: int) -> list[str]:
    """By the real deepspeed launcher. `python -m` rather than the `deepspeed` script: no PATH, and no trouble with
    blanks or long paths in the script's first line."""
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        # A file that cannot exist: on docker nodes the launcher's default, /job/hostfile, often does.
        *("--hostfile", os.devnull + "/none", "--num_gpus", str(ranks), "--master_port", str(port)),
        *("--log_level", "error", "--module", RANK_MODULE),
        *arguments,
    ]


def rank_arguments(run: RunConfig, resume: str = "auto") -> list[str]:
    """What ranks are started with. Writes the config, resolved once for all of them, into the run folder."""
    folder = RunFolder(Path(run.run_dir).expanduser().resolve())
    os.close(folder.acquire_lock())  # no other job is reading it
    folder.launch_config.parent.mkdir(parents=True, exist_ok=True)
    write_whole(folder.launch_config, dump_yaml(run))
    return ["--config", str(folder.launch_config), "--resume", resume]


def run_local_ranks(
    arguments: list[str],
    ranks: int,
    log: Path,
    command: LocalCommand = local_command,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Runs training to its end and returns the exit code. What ranks and launcher print on stdout goes to `log`.

    `variables` are set for the ranks beside those that the machine needs.
    """
    environment = {**os.environ, **default_environment(ranks), **variables}
    code = 0
    for _ in range(PORT_TRIES):
        code = run_group(command(arguments, ranks, free_port()), environment, log)
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
