"""Implements `z2all train` on one machine: checks, builds the ops, starts the ranks and evaluates the outcome."""

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
    """The ranks failed and have reported why; carries their exit code."""

    def __init__(self, what: str, rule: str, fix: str, code: int) -> None:
        super().__init__(what, rule, fix)
        self.exit_code = code


def default_ranks() -> int:
    """Return the number of GPUs, or 1 on a CPU (one process already uses all cores)."""
    return gpu_count() or 1


def train_on_this_machine(
    run: RunConfig, ranks: int | None, resume: str = "auto", command: LocalCommand = local_command
) -> str:
    """Train and return the recorded outcome: `done`, or `stopped` at a planned stop.

    Does not return after a stop request: Ctrl-C raises KeyboardInterrupt, others exit with EXIT_REQUEUE.
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
        memory.remove_snapshots(folder)  # ended by the user, not by a crash: the snapshots are not needed
        raise
    outcome = last_outcome(folder)
    on_request = outcome == "requeue" and code == EXIT_REQUEUE
    if not on_request and (code != 0 or outcome not in ("done", "stopped")):
        for line in flight_recorder.unfinished_lines(folder):
            say(line)
        # Exit codes of launchers are not reliable: 0 without a recorded outcome is a failure too.
        raise RanksFailed(
            f"training in {folder.root}",
            f"ended with code {code} and did not record that it is done{_fault_suffix(folder)}",
            f"See {folder.root / 'logs'}; the same command resumes from the last checkpoint.",
            code or ClusterError.exit_code,
        )
    if signals.received == signal.SIGINT:
        raise KeyboardInterrupt
    if signals.received or on_request:
        raise SystemExit(EXIT_REQUEUE)
    assert outcome is not None
    return outcome


def _fault_suffix(folder: RunFolder) -> str:
    """Return the first fault as a suffix, if the rank could not report it itself."""
    fault = first_fault(read_faults(folder))
    return f" ({fault.line})" if fault and fault.kind in (KILLED, HANG, OUT_OF_MEMORY) else ""


def check_before_launch(run: RunConfig, ranks: int, resume: str) -> None:
    """Run every check that is possible before torch is loaded; then build the ops."""
    check_ranks(ranks, gpu_count())
    resolved = resolve(run, ranks, device_type())
    check_data(run, ranks)
    first_weights(run, resume)
    check_run_folder(run)
    require_disk(resolved)
    prebuild(needed_ops(resolved, device_type()))


def check_run_folder(run: RunConfig) -> None:
    """Check that it is writable and that a checkpoint fits: fp32 weights and two moments, bf16 weights, headers."""
    folder = Path(run.run_dir).expanduser().resolve()
    require_free_disk(folder, 16 * count_parameters(run.model.shape).total, "a checkpoint of this model")
    with explain_disk_errors(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"run_dir={run.run_dir}", "part of it is a file", "Use a folder.") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"run_dir={run.run_dir}", "is not writable", "Use a folder of your own.")
