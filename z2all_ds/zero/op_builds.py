"""Builds DeepSpeed's ops once, in one process, before the ranks start, so that ranks do not wait silently.

python -m z2all_ds.zero.op_builds deepspeed_shm_comm
"""

import os
import re
import socket
import sys
import time
from pathlib import Path

from z2all_ds.base import machine
from z2all_ds.base.child_process import run_group
from z2all_ds.base.console import heartbeat, human_seconds, say
from z2all_ds.base.errors import MachineError
from z2all_ds.base.parent_watch import follow_owner
from z2all_ds.zero.build_locks import BUILDERS, find_locks, remove_stale_locks
from z2all_ds.zero.ds_config import ResolvedDeepSpeed
from z2all_ds.zero.offload_disk import disk_folders, require_libaio


def needed_ops(resolved: ResolvedDeepSpeed, device_type: str) -> list[str]:
    """Return the ops this run will load: shared-memory communication of CPU ranks, optimizers, disk I/O."""
    ops = ["deepspeed_shm_comm"] if device_type == "cpu" else []
    disk = ["async_io"] if disk_folders(resolved.config) else []
    return [*ops, *ops_of_optimizer(resolved.optimizer.kind), *disk]


def buildable_ops() -> list[str]:
    """Return the ops that runs on this machine can use: shared-memory communication is for ranks on a CPU, fused_adam
    for GPUs; async_io, which few runs need, is left out if its library is missing."""
    of_the_other_device = "deepspeed_shm_comm" if machine.gpu_count() else "fused_adam"
    ops = [op for op in BUILDERS if op != of_the_other_device]
    try:
        require_libaio()
    except MachineError as error:
        say(f"not built: async_io ({error})")
        ops.remove("async_io")
    return ops


def ops_of_optimizer(kind: str) -> list[str]:
    return {"ds_cpu_adam": ["cpu_adam"], "ds_fused_adam": ["fused_adam"]}.get(kind, [])


def prebuild(ops: list[str]) -> None:
    """Build the missing ops and show number and time; does nothing on the second call."""
    environment = {**os.environ, **machine.default_environment(ranks=1)}
    folder = Path(environment["TORCH_EXTENSIONS_DIR"])
    wait_for_locks(folder, ops)
    missing = [op for op in ops if not machine.op_is_built(folder, op)]
    if missing:
        machine.require_compiler(environment)
        machine.require_free_disk(folder, 300_000_000, "building DeepSpeed ops")
    if "async_io" in missing:
        require_libaio(environment)
    # The ranks have not started, so all cores may compile.
    environment.pop("OMP_NUM_THREADS", None)
    for number, op in enumerate(missing, 1):
        # One log per process: nodes that share a home folder build at the same time, and torch serializes them.
        log, began = folder / f"{op}.{socket.gethostname()}-{os.getpid()}.build.log", time.monotonic()
        with heartbeat(f"building DeepSpeed op {op}, {number} of {len(missing)} (once, a minute or more)"):
            command = [sys.executable, "-m", "z2all_ds.zero.op_builds", op]
            code = run_group(command, environment, log, stderr_to_log=True)
        if code != 0:
            # Report the first error line in the output of compilers, linkers and ninja.
            lines = log.read_text(errors="replace").splitlines() or ["no message"]
            reason = next((line for line in lines if re.search(r"\berror: |: cannot find ", line)), lines[-1])
            raise MachineError(f"DeepSpeed op {op}", f"does not build ({reason.strip()})", f"Full log: {log}")
        log.unlink()
        # Older than its plan if only the plan was written again, after a killed build of another environment.
        (folder / op / f"{op}.so").touch()
        say(f"built DeepSpeed op {op}, {number} of {len(missing)}, in {human_seconds(time.monotonic() - began)}")


def wait_for_locks(folder: Path, ops: list[str]) -> None:
    """Return when no build of one of these ops holds a lock; builds of other ops do not matter.

    torch would wait silently, and forever for the lock of a killed build.
    """

    def held() -> list[Path]:
        return [lock.path for lock in find_locks(folder) if lock.path.parent.name in ops]

    def remove_stale() -> None:
        for lock in remove_stale_locks(folder):
            say(f"removed the lock of a killed build: {lock}")

    remove_stale()
    if locks := held():
        with heartbeat(f"waiting for another build of DeepSpeed ops ({locks[0]})"):
            while held():
                time.sleep(0.5)
                remove_stale()


def build_here(op: str) -> None:
    """Build and load one op in this process."""
    follow_owner()
    if machine.gpu_count() == 0:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder(BUILDERS[op]).load(verbose=False)


if __name__ == "__main__":
    build_here(sys.argv[1])
