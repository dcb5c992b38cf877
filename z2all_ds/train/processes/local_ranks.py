"""Starts the ranks of one machine, waits for them, and leaves no process behind."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from z2all_ds.base.atomic import open_own, write_whole
from z2all_ds.base.child_process import end_group, run_group, start
from z2all_ds.base.config import RunConfig, dump_yaml
from z2all_ds.base.errors import ClusterError, PortTaken
from z2all_ds.base.machine import default_environment, free_port
from z2all_ds.base.paths import full_path
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.train.processes.starter import blocked_signals

RANK_MODULE = "z2all_ds.train.pretrain"
PORT_TRIES = 3
RANKS_GRACE_SECONDS = 1.0

LocalCommand = Callable[[list[str], int, int], list[str]]
"""Builds the start command from a rank's arguments, the number of ranks and a port."""


def local_command(arguments: list[str], ranks: int, port: int, module: str = RANK_MODULE) -> list[str]:
    """Return the command of this package's starter, which loads nothing before the ranks do."""
    return [sys.executable, "-m", "z2all_ds.train.processes.starter", str(ranks), str(port), module, *arguments]


def deepspeed_command(arguments: list[str], ranks: int, port: int) -> list[str]:
    """Return the command of the deepspeed launcher. `python -m` instead of the `deepspeed` script does not depend on
    PATH, nor fails for blanks or long paths in the script's first line."""
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        # A file that cannot exist: the launcher's default, /job/hostfile, often exists in containers.
        *("--hostfile", os.devnull + "/none", "--num_gpus", str(ranks), "--master_port", str(port)),
        *("--log_level", "error", "--module", RANK_MODULE),
        *arguments,
    ]


def rank_arguments(run: RunConfig, resume: str = "auto") -> list[str]:
    """Write the resolved config into the run folder and return the arguments of the ranks."""
    folder = RunFolder(full_path(run.run_dir))
    folder.claim()  # before rank 0 does: it would take the file for that of another program
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
    """Run training to its end and return the exit code. Ranks' and launcher's stdout goes to `log`.

    `variables` are set for the ranks in addition to those that the machine needs.
    """
    environment = {**os.environ, **default_environment(ranks), **variables}
    code = 0
    for _ in range(PORT_TRIES):
        words = command(arguments, ranks, free_port())
        if command is local_command:
            code = run_starter(words, environment, log)
        else:
            code = run_group(words, environment, log, grace_seconds=RANKS_GRACE_SECONDS)
        # Another process took the free port before rank 0 bound it: rare; retry with another port.
        if code != PortTaken.exit_code:
            break
    return code


def run_starter(command: list[str], environment: Mapping[str, str], log: Path) -> int:
    """Do the same as `run_group`, but the child never receives STOP_SIGNALS."""
    log.parent.mkdir(parents=True, exist_ok=True)
    process: subprocess.Popen[bytes] | None = None
    with open(log, "wb", opener=open_own) as file:
        try:
            with blocked_signals():
                process = start(command, environment, stdout=file)
            return process.wait()
        finally:
            if process:
                end_group(process, RANKS_GRACE_SECONDS)  # a short grace: the ranks ignore SIGTERM


def check_ranks(ranks: int, gpus: int) -> None:
    """Check that there is at most one rank per GPU; NCCL does not support two on one."""
    if ranks < 1 or (gpus and ranks > gpus):
        raise ClusterError(
            f"ranks={ranks}",
            f"must be 1 to {gpus}, one for each GPU" if gpus else "must be at least 1",
            "Set --ranks, or DS_ACCELERATOR=cpu to train on the CPU.",
        )
