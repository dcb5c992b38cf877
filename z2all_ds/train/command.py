"""Implements `z2all train` on one machine: checks, builds the ops, starts the ranks and evaluates the outcome."""

import os
import signal
import time

from z2all_ds.base.accounting import count_parameters
from z2all_ds.base.atomic import explain_disk_errors
from z2all_ds.base.config import RunConfig, anchored
from z2all_ds.base.console import say
from z2all_ds.base.errors import (
    EXIT_REQUEUE,
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    MachineError,
    TrainingError,
)
from z2all_ds.base.fault_records import (
    HANG,
    KILLED,
    OUT_OF_MEMORY,
    Fault,
    first_fault,
    forget_faults,
    name_launch,
    read_faults,
)
from z2all_ds.base.machine import device_type, gpu_count, require_free_disk
from z2all_ds.base.paths import full_path
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import memory
from z2all_ds.checkpoint.layout import asked_checkpoint
from z2all_ds.track.writer import count_events, last_outcome, record_failed_launch
from z2all_ds.train.inputs import check_data, require_folders
from z2all_ds.train.processes import flight_recorder
from z2all_ds.train.processes.local_ranks import (
    LocalCommand,
    check_ranks,
    local_command,
    rank_arguments,
    run_local_ranks,
)
from z2all_ds.train.processes.startup import ASKED_VARIABLE
from z2all_ds.train.processes.stopping import requeue_on_signals, stop_on_signals
from z2all_ds.zero.ds_config import resolve
from z2all_ds.zero.first_weights import first_weights, is_new_run
from z2all_ds.zero.offload_disk import require_disk
from z2all_ds.zero.op_builds import needed_ops, prebuild

ERRORS_OF_RANKS = (ConfigError, DataError, CheckpointError, ClusterError, MachineError, TrainingError)


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
    with requeue_on_signals():
        run = anchored(run)
        ranks = default_ranks() if ranks is None else ranks
        check_before_launch(run, ranks, resume)
        folder = RunFolder(full_path(run.run_dir))
        with folder.launching():
            return _train(run, folder, ranks, resume, command, asked)


def _train(
    run: RunConfig, folder: RunFolder, ranks: int, resume: str, command: LocalCommand, asked: dict[str, str]
) -> str:
    """Start the ranks and wait for their end."""
    arguments = rank_arguments(run, resume)
    forget_faults(folder)
    launch, events_before = name_launch(), count_events(folder)
    try:
        with stop_on_signals(folder) as signals:
            code = run_local_ranks(arguments, ranks, folder.root / "logs" / "launcher.log", command, asked)
    except KeyboardInterrupt as interrupt:
        memory.remove_snapshots(folder)  # ended by the user, not by a crash: the snapshots are not needed
        record_failed_launch(folder, f"ended at once by a second signal, {interrupt}", events_before)
        raise
    outcome = last_outcome(folder, launch)
    on_request = outcome == "requeue" and code == EXIT_REQUEUE
    if not on_request and (code != 0 or outcome not in ("done", "stopped")):
        for line in flight_recorder.unfinished_lines(folder):
            say(line)
        # Exit codes of launchers are not reliable: 0 without a recorded outcome is a failure too.
        rule = f"stopped with exit code {code}{_kind(code)}" if code else "ended without a recorded outcome"
        fault = first_fault(read_faults(folder))
        record_failed_launch(folder, fault.line if fault else rule, events_before, is_cause=fault is not None)
        raise RanksFailed(
            f"training in {folder.root}",
            rule + _suffix(fault),
            f"See the lines above and {folder.root / 'logs'}; the same command resumes from the last checkpoint.",
            code or ClusterError.exit_code,
        )
    if signals.received == signal.SIGINT:
        raise KeyboardInterrupt
    if signals.received or on_request:
        raise SystemExit(EXIT_REQUEUE)
    assert outcome is not None
    return outcome


def _kind(code: int) -> str:
    """Return the kind of error that has this exit code."""
    kinds = {kind.exit_code: kind.__name__.removesuffix("Error").lower() for kind in ERRORS_OF_RANKS}
    return f" ({kinds[code]} error)" if code in kinds else ""


def _suffix(fault: Fault | None) -> str:
    """Return the fault as a suffix, if the rank could not report it itself."""
    return f" ({fault.line})" if fault and fault.kind in (KILLED, HANG, OUT_OF_MEMORY) else ""


def check_before_launch(run: RunConfig, ranks: int, resume: str) -> None:
    """Run every check that is possible before torch is loaded, in the order in which a person fixes what they report;
    then build the ops."""
    require_folders(run)
    check_ranks(ranks, gpu_count())
    resolved = resolve(run, ranks, device_type())
    check_data(run, ranks, is_new_run(run, resume), beat=lambda: None)
    asked_checkpoint(RunFolder(full_path(run.run_dir)).checkpoints, resume, verify_checksums=False)
    first_weights(run, resume)
    check_run_folder(run)
    require_disk(resolved)
    prebuild(needed_ops(resolved, device_type()))


def check_run_folder(run: RunConfig) -> None:
    """Check that it is writable and, if the run saves, that a checkpoint fits: fp32 weights and two moments, bf16
    weights, headers."""
    folder = full_path(run.run_dir)
    if run.writes_checkpoints:
        require_free_disk(folder, 16 * count_parameters(run.model.shape).total, "a checkpoint of this model")
    with explain_disk_errors(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"run_dir={run.run_dir}", "part of it is a file", "Use a folder.") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"run_dir={run.run_dir}", "is not writable", "Use a folder of your own.")
