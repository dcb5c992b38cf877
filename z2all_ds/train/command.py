"""What `z2all train` does around the ranks: cheap checks first, ops built once, ranks started, the outcome judged."""

import os
import signal
import time
from pathlib import Path

from z2all_ds.base.accounting import count_parameters
from z2all_ds.base.atomic import explain_disk_errors
from z2all_ds.base.config import RunConfig, anchored
from z2all_ds.base.console import say
from z2all_ds.base.errors import EXIT_REQUEUE, ClusterError, ConfigError
from z2all_ds.base.fault_records import HANG, KILLED, OUT_OF_MEMORY, first_fault, forget_faults, read_faults
from z2all_ds.base.machine import device_type, gpu_count, require_free_disk
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import memory
from z2all_ds.track.writer import last_outcome
from z2all_ds.train.inputs import check_data
from z2all_ds.train.processes import flight_recorder
from z2all_ds.train.processes.local_ranks import (
    LocalCommand,
    check_ranks,
    local_command,
    rank_arguments,
    run_local_ranks,
)
from z2all_ds.train.processes.startup import ASKED_VARIABLE
from z2all_ds.train.processes.stopping import stop_on_signals
from z2all_ds.zero.ds_config import resolve
from z2all_ds.zero.first_weights import first_weights
from z2all_ds.zero.offload_disk import require_disk
from z2all_ds.zero.op_builds import needed_ops, prebuild


class RanksFailed(ClusterError):
    """The ranks ended badly and have said why themselves; carries their exit code on."""

    def __init__(self, what: str, rule: str, fix: str, code: int) -> None:
        super().__init__(what, rule, fix)
        self.exit_code = code


def default_ranks() -> int:
    """All GPUs, or one process on a CPU (which already uses all its cores)."""
    return gpu_count() or 1


def train_on_this_machine(
    run: RunConfig, ranks: int | None, resume: str = "auto", command: LocalCommand = local_command
) -> str:
    """Trains and returns the run's own word: `done`, or `stopped` where a stop was planned.

    Stopped by a request it does not return: Ctrl-C ends as Ctrl-C, all else with EXIT_REQUEUE.
    """
    asked = {ASKED_VARIABLE: str(time.monotonic())}
    run = anchored(run)
    ranks = default_ranks() if ranks is None else ranks
    check_before_launch(run, ranks, resume)
    folder = RunFolder(Path(run.run_dir).expanduser().resolve())
    arguments = rank_arguments(run, resume)
    forget_faults(folder)
    try:
        with stop_on_signals(folder) as signals:
            code = run_local_ranks(arguments, ranks, folder.root / "logs" / "launcher.log", command, asked)
    except KeyboardInterrupt:
        memory.remove_all_of(folder)  # ended at once by hand, not by a crash: nothing is left behind
        raise
    outcome = last_outcome(folder)
    on_request = outcome == "requeue" and code == EXIT_REQUEUE
    if not on_request and (code != 0 or outcome not in ("done", "stopped")):
        for line in flight_recorder.told(folder):
            say(line)
        # Launchers' exit codes are not to be trusted alone: 0 without the run's own word is a failure too.
        raise RanksFailed(
            f"training in {folder.root}",
            f"ended with code {code} and without its own word that it is done{_unsaid(folder)}",
            f"See {folder.root / 'logs'}; the same command goes on from the last checkpoint.",
            code or ClusterError.exit_code,
        )
    if signals.received == signal.SIGINT:
        raise KeyboardInterrupt
    if signals.received or on_request:
        raise SystemExit(EXIT_REQUEUE)
    assert outcome is not None
    return outcome


def _unsaid(folder: RunFolder) -> str:
    """The reason, where the rank could not say it itself."""
    fault = first_fault(read_faults(folder))
    return f" ({fault.line})" if fault and fault.kind in (KILLED, HANG, OUT_OF_MEMORY) else ""


def check_before_launch(run: RunConfig, ranks: int, resume: str) -> None:
    """Everything that can be known to fail before torch is loaded; then the ops."""
    check_ranks(ranks, gpu_count())
    resolved = resolve(run, ranks, device_type())
    check_data(run, ranks)
    first_weights(run, resume)
    check_run_folder(run)
    require_disk(resolved)
    prebuild(needed_ops(resolved, device_type()))


def check_run_folder(run: RunConfig) -> None:
    """It can be written, and one checkpoint fits: fp32 weights and two moments, bf16 weights, and some headers."""
    folder = Path(run.run_dir).expanduser().resolve()
    require_free_disk(folder, 16 * count_parameters(run.model.shape).total, "a checkpoint of this model")
    with explain_disk_errors(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"run_dir={run.run_dir}", "part of it is a file", "Give a folder.") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"run_dir={run.run_dir}", "cannot be written", "Give a folder of your own.")
