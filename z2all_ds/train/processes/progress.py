"""Heartbeat of a rank: a small memory-mapped file that the watchdog of its node reads.

Written at every startup phase and every micro-batch with one store to memory: the cost per step is negligible.
"""

import faulthandler
import hashlib
import json
import mmap
import os
import shutil
import signal
import struct
import time
from contextlib import suppress
from pathlib import Path

from z2all_ds.base.atomic import open_own
from z2all_ds.base.child_process import module_command, start
from z2all_ds.base.errors import MachineError
from z2all_ds.base.machine import private_temp_dir, process_start_time
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.world import World
from z2all_ds.train.processes import flight_recorder

BEAT = struct.Struct("<qdq")
"""Count, time (time.monotonic, the same clock for all processes of a machine), step."""
STACKS_SIGNAL = signal.SIGUSR2
SIZE = 4096
WRITE_TRIES = 1000
OLD_SECONDS = 30 * 24 * 3600.0


class Progress:
    """The heartbeat file of one rank: the beat first, then the identity of the rank as JSON."""

    def __init__(self, folder: RunFolder, world: World, hang_seconds: float, events_before: int | None = None) -> None:
        """`events_before`: on rank 0, the number of events before this launch; its watchdog may record the failure."""
        self._count, self._step, self._rank = 0, -1, world.rank
        place = watch_folder(folder)
        _sweep(place.parent)
        # The watchdog may ask any rank that it has seen for its stacks, and by default this signal ends a process. So
        # the handler comes before the file, and afterwards the signal is ignored. It works in a stuck interpreter.
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
        folder.stacks(world.rank).parent.mkdir(parents=True, exist_ok=True)
        self._stacks = open(folder.stacks(world.rank), "w", opener=open_own)  # noqa: SIM115 - until `end`
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)
        faulthandler.enable(self._stacks)  # also write the stacks of a crash
        who = {
            "rank": world.rank,
            "pid": os.getpid(),
            "start_time": process_start_time(os.getpid()),
            "stacks": str(folder.stacks(world.rank)),
        }
        self.path = place / file_name(world.rank)
        self._memory = _create(self.path, (self._next_beat() + json.dumps(who).encode()).ljust(SIZE, b"\0"))
        if world.local_rank == 0:
            self._start_watchdog(folder, hang_seconds, events_before)

    def beat(self, step: int | None = None) -> None:
        self._step = self._step if step is None else step
        # Not pack_into, which writes zeros first: the watchdog would read them as hours of silence and end the run.
        self._memory[: BEAT.size] = self._next_beat()

    def _next_beat(self) -> bytes:
        self._count += 1
        return BEAT.pack(self._count, time.monotonic(), self._step)

    def record_flight(self, folder: RunFolder) -> None:
        """Enable NCCL's flight recorder, in case this rank hangs; before it joins the others."""
        flight_recorder.switch_on(folder, self.path.parent, self._rank)

    def end(self) -> None:
        """Remove the heartbeat file: this rank ends normally, and the watchdog must not report it."""
        self.path.unlink(missing_ok=True)
        flight_recorder.pipe_of(self.path.parent, self._rank).unlink(missing_ok=True)
        with suppress(OSError):  # succeeds for the last rank
            self.path.parent.rmdir()
        faulthandler.unregister(STACKS_SIGNAL)
        faulthandler.disable()
        self._stacks.close()
        if not Path(self._stacks.name).stat().st_size:
            Path(self._stacks.name).unlink()

    def _start_watchdog(self, folder: RunFolder, hang_seconds: float, events_before: int | None) -> None:
        records = () if events_before is None else (str(events_before),)
        arguments = (str(folder.root), str(self.path.parent), str(hang_seconds), *records)
        command = module_command("z2all_ds.cluster.launch.watchdog", *arguments)
        start(command, is_owned=False, start_new_session=False)


def _create(path: Path, content: bytes) -> mmap.mmap:
    """Create a file, complete from the start, and map it. Another rank or a watchdog may be removing the folder."""
    temporary = path.with_name(f"new_{path.name}")
    for _ in range(WRITE_TRIES):
        with suppress(FileNotFoundError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w+b") as file:
                file.write(content)
                file.flush()
                memory = mmap.mmap(file.fileno(), SIZE)
            temporary.replace(path)
            return memory
    raise MachineError(str(path), "cannot be written", "Set TMPDIR to a folder that is not cleaned up.")


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}"


def watch_folder(folder: RunFolder) -> Path:
    """Return the folder for the ranks of one launch on this node; its name is derived from their parent process and
    rendezvous, which no other launch shares."""
    parent = os.getppid()
    launch = (str(folder.root), parent, process_start_time(parent), os.environ.get("MASTER_PORT", ""))
    return private_temp_dir() / f"watch_{hashlib.sha256(repr(launch).encode()).hexdigest()[:16]}"


def _sweep(place: Path) -> None:
    """Remove old folders, left behind by nodes that lost power."""
    for folder in place.glob("watch_*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > OLD_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
