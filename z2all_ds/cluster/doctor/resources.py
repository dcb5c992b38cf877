"""What a run uses up: disk, shared memory, open files, processes, main and locked memory."""

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from z2all_ds.base import machine
from z2all_ds.base.console import human_bytes
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.process_memory import available_bytes
from z2all_ds.cluster.doctor.findings import FAIL, OK, WARN, Finding

MIN_DISK_BYTES = 10**9
ROOMY_DISK_BYTES = 20 * 10**9
"""A checkpoint of the 1.2B model with its optimizer is 15 GB, and the one before it stays until it is written."""
MIN_SHM_BYTES = 10**9
MIN_LOCKED_BYTES = 2**30
MIN_OPEN_FILES = 4096
MIN_PROCESSES = 4096
"""Threads count, too: a rank with its loader, torch, NCCL and BLAS has hundreds."""
MIN_MEMORY_BYTES = 4 * 10**9
SLOW_DISK = 100e6
"""Bytes a second."""
SPEED_BLOCK, SPEED_BYTES, SPEED_SECONDS = 8 * 2**20, 256 * 2**20, 2.0


def checks(folder: Path) -> list[Callable[[], list[Finding]]]:
    return [partial(disk, folder), shared_memory, main_memory, numa, open_files, processes]


def require_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder itself, or the one above it that exists: runs make theirs. A file in its place cannot be meant."""
    place, fix = Path(folder).expanduser().absolute(), "Give the folder that runs will be written into."
    try:
        while not place.exists():
            place = place.parent
    except OSError as error:  # somebody else's folder above it, or a name too long
        raise ConfigError(f"folder {folder}", f"cannot be looked at ({error.strerror})", fix) from None
    if not place.is_dir():
        raise ConfigError(f"folder {folder}", f"{place} is a file", fix)
    return place


def disk(folder: Path) -> list[Finding]:
    require_folder(folder)
    bytes_free = machine.require_free_disk(folder, MIN_DISK_BYTES, "any run")
    told = f"{human_bytes(bytes_free)} free at {folder.absolute()}"
    if bytes_free < ROOMY_DISK_BYTES:
        return [Finding("disk", WARN, told, "Enough for a try-out; a checkpoint of a 1.2B model alone is 15 GB.")]
    return [Finding("disk", OK, told)]


def disk_speed(folder: Path) -> list[Finding]:
    """Written and synced, as a checkpoint is. For two seconds at most; the file is gone whatever happens."""
    place = require_folder(folder)
    if shutil.disk_usage(place).free < MIN_DISK_BYTES:
        return []  # `disk` has said so, and what is left is not ours to fill
    block, written, began = os.urandom(SPEED_BLOCK), 0, time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            while written < SPEED_BYTES and time.perf_counter() - began < SPEED_SECONDS:
                written += file.write(block)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        fix = f"Make {place} writable, or give another folder: z2all doctor FOLDER"
        return [Finding("disk speed", FAIL, f"cannot write at {place} ({error.strerror})", fix)]
    speed = written / (time.perf_counter() - began)
    told = f"{human_bytes(speed)}/s written and synced at {place}"
    if speed < SLOW_DISK:
        fix = (
            f"A checkpoint of a 1.2B model (15 GB) would take {15e9 / speed / 60:.0f} min: write runs to another disk."
        )
        return [Finding("disk speed", WARN, told, fix, measured={"bytes_per_second": speed})]
    return [Finding("disk speed", OK, told, measured={"bytes_per_second": speed})]


def shared_memory() -> list[Finding]:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return [Finding("shared memory", WARN, "no /dev/shm", "Mount a tmpfs there: loaders and ranks use it.")]
    return [judge_shared_memory(usage.total, usage.free)]


def judge_shared_memory(total_bytes: int, free_bytes: int) -> Finding:
    if total_bytes < MIN_SHM_BYTES:
        fix = "Start the container with `--shm-size 8g` or `--ipc host`; with less, loaders die of a bus error."
        return Finding("shared memory", WARN, human_bytes(total_bytes), fix)
    told = f"{human_bytes(free_bytes)} free of {human_bytes(total_bytes)}"
    if free_bytes < MIN_SHM_BYTES:
        fix = "See what lies in /dev/shm (`ls -lS /dev/shm`), and remove what no running process needs."
        return Finding("shared memory", WARN, told, fix)
    return Finding("shared memory", OK, told)


def main_memory() -> list[Finding]:
    free = available_bytes()
    if free < MIN_MEMORY_BYTES:
        fix = "Each rank takes 1 to 2 GB before it trains anything: end what else runs, or raise the container's limit."
        return [Finding("main memory", WARN, f"{human_bytes(free)} free", fix)]
    return [Finding("main memory", OK, f"{human_bytes(free)} free")]


def numa(nodes: Path = Path("/sys/devices/system/node")) -> list[Finding]:
    """The machine's memory, and the processors next to each part of it. Ranks on GPUs bind themselves."""
    parts = sorted(nodes.glob("node[0-9]*"), key=lambda node: int(node.name[4:]))
    if len(parts) < 2:
        return []
    told = [f"{part.name[4:]}: processors {(part / 'cpulist').read_text().strip()}" for part in parts]
    return [Finding("NUMA nodes", OK, "; ".join(told))]


def open_files() -> list[Finding]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [judge_limit("open files", limits, MIN_OPEN_FILES, "-n", "nofile")]


def processes() -> list[Finding]:
    limits = resource.getrlimit(resource.RLIMIT_NPROC)
    return [judge_limit("processes and threads", limits, MIN_PROCESSES, "-u", "nproc")]


def judge_limit(name: str, limits: tuple[int, int], least: int, flag: str, item: str) -> Finding:
    """By soft and hard limit: a user may raise the first up to the second, which is root's."""
    soft, hard = limits
    if soft == resource.RLIM_INFINITY or soft >= least:
        return Finding(name, OK, "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")
    if hard == resource.RLIM_INFINITY or hard >= least:
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        return Finding(name, WARN, f"at most {soft}", f"Run `ulimit {flag} {wanted}` before you start a run.")
    fix = f"Raise `{item}` to 65536 in /etc/security/limits.conf, or start the container with `--ulimit {item}=65536`."
    return Finding(name, WARN, f"at most {soft}, by a hard limit of {hard}", fix)


def locked_memory() -> list[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return [judge_locked_memory(soft, has_infiniband())]


def judge_locked_memory(limit: int, infiniband: bool) -> Finding:
    """InfiniBand needs memory that stays where it is; docker's default limit is 64 KiB or 8 MiB."""
    told = "no limit" if limit == resource.RLIM_INFINITY else f"at most {human_bytes(limit)}"
    if infiniband and limit != resource.RLIM_INFINITY and limit < MIN_LOCKED_BYTES:
        fix = "Run `ulimit -l unlimited`, or start the container with `--ulimit memlock=-1`: InfiniBand fails without."
        return Finding("locked memory", WARN, told, fix)
    return Finding("locked memory", OK, told if infiniband else f"{told}; only InfiniBand needs more")


def has_infiniband(devices: Path = Path("/sys/class/infiniband")) -> bool:
    return devices.is_dir() and any(devices.iterdir())
