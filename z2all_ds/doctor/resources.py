"""What a run uses up: disk, shared memory, open files, processes, main memory."""

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from z2all_ds import machine
from z2all_ds.console import human_bytes
from z2all_ds.doctor.findings import OK, WARN, Finding
from z2all_ds.process_memory import available_bytes

MIN_DISK_BYTES = 10**9
ROOMY_DISK_BYTES = 20 * 10**9
"""A checkpoint of the 1.2B model with its optimizer is 15 GB, and the one before it stays until it is written."""
MIN_SHM_BYTES = 10**9
MIN_OPEN_FILES = 4096
MIN_PROCESSES = 4096
"""Threads count, too: a rank with its loader, torch, NCCL and BLAS has hundreds."""
MIN_MEMORY_BYTES = 4 * 10**9
SLOW_DISK = 100e6
"""Bytes a second."""
SPEED_BLOCK, SPEED_BYTES, SPEED_SECONDS = 8 * 2**20, 256 * 2**20, 2.0


def checks(folder: Path) -> list[Callable[[], list[Finding]]]:
    return [partial(disk, folder), shared_memory, main_memory, numa, open_files, processes]


def disk(folder: Path) -> list[Finding]:
    bytes_free = machine.require_free_disk(folder, MIN_DISK_BYTES, "any run")
    told = f"{human_bytes(bytes_free)} free at {folder.absolute()}"
    if bytes_free < ROOMY_DISK_BYTES:
        return [Finding("disk", WARN, told, "Enough for a try-out; a checkpoint of a 1.2B model alone is 15 GB.")]
    return [Finding("disk", OK, told)]


def disk_speed(folder: Path) -> list[Finding]:
    """Written and synced, as a checkpoint is. For two seconds at most; the file is gone whatever happens."""
    place = folder.expanduser().absolute()
    while not place.is_dir():
        place = place.parent
    block, written, began = os.urandom(SPEED_BLOCK), 0, time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            while written < SPEED_BYTES and time.perf_counter() - began < SPEED_SECONDS:
                written += file.write(block)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        fix = f"Make {place} writable, or give another folder: z2all doctor FOLDER"
        return [Finding("disk speed", WARN, f"cannot write at {place} ({error.strerror})", fix)]
    speed = written / (time.perf_counter() - began)
    told = f"{human_bytes(speed)}/s written and synced at {place}"
    if speed < SLOW_DISK:
        fix = (
            f"A checkpoint of a 1.2B model (15 GB) would take {15e9 / speed / 60:.0f} min: write runs to another disk."
        )
        return [Finding("disk speed", WARN, told, fix)]
    return [Finding("disk speed", OK, told)]


def shared_memory() -> list[Finding]:
    try:
        total_bytes = shutil.disk_usage("/dev/shm").total
    except OSError:
        return [Finding("shared memory", WARN, "no /dev/shm", "Mount a tmpfs there: loaders and ranks use it.")]
    if total_bytes < MIN_SHM_BYTES:
        fix = "Start the container with `--shm-size 8g` or `--ipc host`; with less, loaders die of a bus error."
        return [Finding("shared memory", WARN, human_bytes(total_bytes), fix)]
    return [Finding("shared memory", OK, human_bytes(total_bytes))]


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
    return [_limit("open files", resource.RLIMIT_NOFILE, MIN_OPEN_FILES, "-n")]


def processes() -> list[Finding]:
    return [_limit("processes and threads", resource.RLIMIT_NPROC, MIN_PROCESSES, "-u")]


def _limit(name: str, kind: int, least: int, flag: str) -> Finding:
    soft, hard = resource.getrlimit(kind)
    if soft != resource.RLIM_INFINITY and soft < least:
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        return Finding(name, WARN, f"at most {soft}", f"Run `ulimit {flag} {wanted}` before you start a run.")
    return Finding(name, OK, "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")
