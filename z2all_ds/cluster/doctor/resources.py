"""Resources that runs need: disk, shared memory, open files, processes, main and locked memory."""

import os
import resource
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

from z2all_ds.base import machine
from z2all_ds.base.console import human_bytes
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.paths import expanded
from z2all_ds.base.process_memory import available_bytes
from z2all_ds.cluster.doctor.findings import FAIL, OK, WARN, Check, Finding

MIN_DISK_BYTES = 10**9
ROOMY_DISK_BYTES = 20 * 10**9
"""A checkpoint of a 1.2B model with its optimizer has 15 GB, and the previous one stays until it is written."""
MIN_SHM_BYTES = 10**9
MIN_LOCKED_BYTES = 2**30
MIN_OPEN_FILES = 4096
MIN_PROCESSES = 4096
"""Includes threads: a rank with its loader, torch, NCCL and BLAS has hundreds."""
MIN_MEMORY_BYTES = 4 * 10**9
SLOW_DISK = 100e6
"""Bytes per second."""
SPEED_BLOCK, SPEED_BYTES, SPEED_SECONDS = 8 * 2**20, 256 * 2**20, 2.0


def checks(folder: str | os.PathLike[str]) -> list[Check]:
    files = partial(
        judge_limit, "open files", resource.getrlimit(resource.RLIMIT_NOFILE), MIN_OPEN_FILES, "-n", "nofile"
    )
    limits = resource.getrlimit(resource.RLIMIT_NPROC)
    processes = partial(judge_limit, "processes and threads", limits, MIN_PROCESSES, "-u", "nproc")
    return [partial(disk, Path(folder)), shared_memory, main_memory, numa, files, processes, locked_memory]


def require_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the folder, or its nearest parent that exists, since runs create theirs; refuse a file."""
    existing, fix = expanded(folder).absolute(), "Give the folder that runs will be written into."
    try:
        while not existing.exists():
            existing = existing.parent
    except OSError as error:  # no permission, or a name too long
        raise ConfigError(f"folder {folder}", f"cannot be accessed ({error.strerror})", fix) from None
    if not existing.is_dir():
        raise ConfigError(f"folder {folder}", f"{existing} is a file", fix)
    return existing


def disk(folder: Path) -> Finding:
    require_folder(folder)
    bytes_free = machine.require_free_disk(folder, MIN_DISK_BYTES, "any run")
    value = f"{human_bytes(bytes_free)} free at {folder.absolute()}"
    if bytes_free < ROOMY_DISK_BYTES:
        return Finding("disk", WARN, value, "Enough for small runs; one checkpoint of a 1.2B model has 15 GB.")
    return Finding("disk", OK, value)


def disk_speed(folder: Path) -> list[Finding]:
    """Measure writing and syncing, as for a checkpoint, for at most two seconds, to an unnamed temporary file."""
    existing = require_folder(folder)
    if shutil.disk_usage(existing).free < MIN_DISK_BYTES:
        return []  # `disk` reports it
    block, written, began = os.urandom(SPEED_BLOCK), 0, time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            while written < SPEED_BYTES and time.perf_counter() - began < SPEED_SECONDS:
                written += file.write(block)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        fix = f"Make {existing} writable, or give another folder: z2all doctor FOLDER"
        return [Finding("disk speed", FAIL, f"cannot write at {existing} ({error.strerror})", fix)]
    speed = written / (time.perf_counter() - began)
    value, measured = f"{human_bytes(speed)}/s written and synced at {existing}", {"bytes_per_second": speed}
    if speed < SLOW_DISK:
        fix = f"A checkpoint of a 1.2B model (15 GB) takes {15e9 / speed / 60:.0f} min: write runs to another disk."
        return [Finding("disk speed", WARN, value, fix, measured=measured)]
    return [Finding("disk speed", OK, value, measured=measured)]


def shared_memory() -> Finding:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return Finding("shared memory", WARN, "no /dev/shm", "Mount a tmpfs there: loaders and ranks use it.")
    return judge_shared_memory(usage.total, usage.free)


def judge_shared_memory(total_bytes: int, free_bytes: int) -> Finding:
    if total_bytes < MIN_SHM_BYTES:
        fix = "Start the container with `--shm-size 8g` or `--ipc host`; with less, loaders die with a bus error."
        return Finding("shared memory", WARN, human_bytes(total_bytes), fix)
    value = f"{human_bytes(free_bytes)} free of {human_bytes(total_bytes)}"
    if free_bytes < MIN_SHM_BYTES:
        fix = "List /dev/shm (`ls -lS /dev/shm`) and remove files that no running process needs."
        return Finding("shared memory", WARN, value, fix)
    return Finding("shared memory", OK, value)


def main_memory() -> Finding:
    free = available_bytes()
    if free < MIN_MEMORY_BYTES:
        fix = "Each rank needs 1 to 2 GB to start: end other processes, or raise the container's limit."
        return Finding("main memory", WARN, f"{human_bytes(free)} free", fix)
    return Finding("main memory", OK, f"{human_bytes(free)} free")


def numa(nodes: Path = Path("/sys/devices/system/node")) -> list[Finding]:
    """List the processors of each NUMA node, if there are several. Ranks on GPUs bind themselves."""
    parts = sorted(nodes.glob("node[0-9]*"), key=lambda node: int(node.name[4:]))
    if len(parts) < 2:
        return []
    listed = [f"{part.name[4:]}: processors {(part / 'cpulist').read_text().strip()}" for part in parts]
    return [Finding("NUMA nodes", OK, "; ".join(listed))]


def judge_limit(name: str, limits: tuple[int, int], least: int, flag: str, item: str) -> Finding:
    """Judge soft and hard limit: a user can raise the soft limit up to the hard one."""
    soft, hard = limits
    if soft == resource.RLIM_INFINITY or soft >= least:
        return Finding(name, OK, "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")
    if hard == resource.RLIM_INFINITY or hard >= least:
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        return Finding(name, WARN, f"at most {soft}", f"Run `ulimit {flag} {wanted}` before you start a run.")
    fix = f"Raise `{item}` to 65536 in /etc/security/limits.conf, or start the container with `--ulimit {item}=65536`."
    return Finding(name, WARN, f"at most {soft}, with a hard limit of {hard}", fix)


def locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return judge_locked_memory(soft, has_infiniband())


def judge_locked_memory(limit: int, infiniband: bool) -> Finding:
    """Judge the limit of locked memory, which InfiniBand needs; docker's default is 64 KiB or 8 MiB."""
    value = "no limit" if limit == resource.RLIM_INFINITY else f"at most {human_bytes(limit)}"
    if infiniband and limit != resource.RLIM_INFINITY and limit < MIN_LOCKED_BYTES:
        fix = (
            "Run `ulimit -l unlimited`, or start the container with `--ulimit memlock=-1`: InfiniBand fails without it."
        )
        return Finding("locked memory", WARN, value, fix)
    return Finding("locked memory", OK, value if infiniband else f"{value}; only InfiniBand needs more")


def has_infiniband(devices: Path = Path("/sys/class/infiniband")) -> bool:
    return devices.is_dir() and any(devices.iterdir())
