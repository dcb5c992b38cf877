"""The program of each rank: `deepspeed launch/pretrain.py --config run.yaml --deepspeed zero2 train.steps=100`.

Runs the cheap checks first (config, data, shape), then starts the loop. All output of a rank goes to
logs/rank_NNNN.log; rank 0 also prints to the terminal.
"""

import argparse
import logging
import os
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from z2all_ds.base.config import RunConfig, anchored, load_run_config
from z2all_ds.base.config.explain import refuse_option
from z2all_ds.base.console import say
from z2all_ds.base.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, EXIT_REQUEUE, ConfigError, Z2allError
from z2all_ds.base.fault_records import (
    BUG,
    LAUNCH_VARIABLE,
    LOST_PEER,
    OUT_OF_MEMORY,
    Fault,
    cause_since,
    family_of,
    forget_fault,
    write_fault,
)
from z2all_ds.base.machine import device_type, set_compile_cache
from z2all_ds.base.parent_watch import follow_owner
from z2all_ds.base.paths import explain_system_errors, full_path
from z2all_ds.base.run_folder import RunFolder, file_id
from z2all_ds.base.world import World
from z2all_ds.checkpoint.settings import with_saved_lanes
from z2all_ds.track.writer import count_events, record_failure
from z2all_ds.train.inputs import check_data, require_folders
from z2all_ds.train.processes.logs import RankOutput
from z2all_ds.train.processes.lost_peer import LostPeer
from z2all_ds.train.processes.progress import Progress
from z2all_ds.train.processes.startup import Startup
from z2all_ds.train.rank import Inputs, Rank, train_rank
from z2all_ds.zero.ds_config import resolve
from z2all_ds.zero.first_weights import first_weights, is_new_run
from z2all_ds.zero.offload_disk import require_disk


def main(arguments: list[str] | None = None) -> int:
    """Run a rank; return the exit code."""
    began_unix, startup = time.time(), Startup()
    options, run = parse(sys.argv[1:] if arguments is None else arguments)
    world = World.take_from_environment()
    folder = RunFolder(full_path(run.run_dir))
    try:
        if world.is_main:
            folder.claim()
        output = RankOutput(folder, world)
    except ConfigError as error:
        say(f"{type(error).__name__}: {error}")
        return error.exit_code
    follow_owner()
    lock, inputs, progress = None, None, None
    failure, events_before = "", None
    try:
        lock = folder.acquire_lock() if world.is_main else None
        folder = replace(folder, lock_id=None if lock is None else file_id(lock))
        if lock is not None:
            events_before = count_events(folder)
        forget_fault(folder, world.rank)
        progress = Progress(folder, world, run.train.hang_seconds, events_before)
        startup.on_phase = progress.beat
        startup.done("imports")
        set_compile_cache()  # for launchers that give ranks no environment of this machine: pdsh, mpirun
        with explain_system_errors():
            run = with_saved_lanes(run, options.resume)
            inputs = check_inputs(run, world, options.resume, progress)
        startup.done("data")
        outcome = train_rank(Rank(run, options.resume, folder, world, inputs, output, startup, progress))
    except Z2allError as error:
        failure = f"{type(error).__name__}: {error}"
        kind = LOST_PEER if isinstance(error, LostPeer) else family_of(error)
        if lock is not None or not world.is_main:  # otherwise the folder belongs to the job that holds the lock
            leave_fault(folder, world, kind, failure, error.exit_code)
        # A user's mistake is the same on all ranks: rank 0 reports it. Missing files are missing for all ranks of a
        # machine: its first rank reports them. Later errors of one rank (its shard, its disk) are reported by itself.
        speaks = (world.local_rank == 0 or inputs is not None) and not isinstance(error, ConfigError)
        output.fail(failure, show=world.is_main or speaks)
        return error.exit_code
    except KeyboardInterrupt:
        failure = "ended at once by SIGINT"
        return EXIT_INTERRUPTED
    except Exception as error:  # a bug, perhaps on one rank only: the full text goes to its log and the terminal
        kind = OUT_OF_MEMORY if "OutOfMemory" in type(error).__name__ else BUG
        failure = " ".join(f"{type(error).__name__}: {error}".split())
        leave_fault(folder, world, kind, failure, EXIT_BUG)
        output.fail(traceback.format_exc(), show=True)
        return EXIT_BUG
    finally:
        if failure and events_before is not None and not os.environ.get(LAUNCH_VARIABLE):  # else our launcher does
            record_end(folder, failure, events_before, began_unix)
        if progress is not None:
            progress.end()
        if lock is not None:
            os.close(lock)
    return EXIT_REQUEUE if outcome == "requeue" else EXIT_OK


def leave_fault(folder: RunFolder, world: World, kind: str, line: str, code: int) -> None:
    """Write the fault record for the launcher."""
    line = " ".join(line.split())  # as in the event of the recorder
    weight = 1 if f"rank {world.rank}:" in line else 0
    write_fault(folder, Fault(kind, world.rank, socket.gethostname(), line, code, weight))


def record_end(folder: RunFolder, failure: str, events_before: int, began_unix: float) -> None:
    """Record why the run has failed: the first error of its ranks, perhaps not that of rank 0. Must not hide it."""
    fault = cause_since(folder, began_unix)
    with suppress(OSError, Z2allError):
        record_failure(folder, fault.line if fault else failure, events_before, is_cause=fault is not None)


def parse(arguments: list[str]) -> tuple[argparse.Namespace, RunConfig]:
    """Parse the command line of a rank; the launcher puts --local_rank first."""
    parser = argparse.ArgumentParser(description="Train one rank. Started by the deepspeed launcher or torchrun.")
    parser.add_argument("--config", help="run YAML, or the name of a preset")
    parser.add_argument("--deepspeed", help="name of a shipped DeepSpeed JSON, or a path")
    parser.add_argument("--resume", default="auto", help="auto, never, or the path of a checkpoint")
    parser.add_argument("--local_rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options, unknown = parser.parse_known_args(arguments)
    overrides = [*options.overrides, *([f"deepspeed={options.deepspeed}"] if options.deepspeed else [])]
    try:
        for option in unknown:
            refuse_option(option.partition("=")[0], arguments)
            raise ConfigError(f"argument {option!r}", "is not one of `z2all train`", "See `z2all train --help`.")
        return options, anchored(load_run_config(options.config, overrides))
    except Z2allError as error:
        if os.environ.get("RANK", "0") == "0":
            say(f"{type(error).__name__}: {error}")
        raise SystemExit(error.exit_code) from None


def check_inputs(run: RunConfig, world: World, resume: str, progress: Progress) -> Inputs:
    """Check all inputs; mistakes end the run here, on all ranks at once."""
    require_folders(run)
    expected = device_type()
    resolved = resolve(run, world.world_size, expected)
    require_disk(resolved)
    data = check_data(run, world.world_size, is_new_run(run, resume), progress.beat)
    return Inputs(expected, resolved, data, first_weights(run, resume))


def run() -> NoReturn:
    """Run a rank and exit. After a success, leave the process group first: its threads may abort an exiting process."""
    code = main()
    logging.shutdown()
    distributed = sys.modules.get("torch.distributed")
    if distributed and code in (EXIT_OK, EXIT_REQUEUE) and distributed.is_initialized():
        distributed.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    run()
