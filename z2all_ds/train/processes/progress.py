"""A rank's sign of life: a small file in the node's memory that its watchdog reads.

Written at every phase of the start-up and every micro-batch, by a store into mapped memory: nothing a step could feel.
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

from z2all_ds.base.child_process import module_command, start
from z2all_ds.base.errors import MachineError
from z2all_ds.base.machine import private_temp_dir, process_start_time
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.world import World
from z2all_ds.train.processes import flight_recorder

BEAT = struct.Struct("<qdq")
"""How often, when (time.monotonic, one clock for all processes of a machine), in which step."""
STACKS_SIGNAL = signal.SIGUSR2
SIZE = 4096
WRITE_TRIES = 1000
OLD_SECONDS = 30 * 24 * 3600.0


class Progress:
    """Of one rank. The file has the beat first, then who it is, as JSON."""

    def __init__(self, folder: RunFolder, world: World, hang_seconds: float) -> None:
        self._count, self._step, self._rank = 0, -1, world.rank
        place = watch_folder(folder)
        _sweep(place.parent)
        who = {
            "rank": world.rank,
            "pid": os.getpid(),
            "start_time": process_start_time(os.getpid()),
            "stacks": str(folder.stacks(world.rank)),
        }
        text = json.dumps(who).encode()
        self.path = place / file_name(world.rank)
        _write(self.path, (bytes(BEAT.size) + text).ljust(SIZE, b"\0"))
        with self.path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SIZE)
        self.beat()
        # Works whatever the interpreter is stuck in: the handler is C and needs no lock.
        folder.stacks(world.rank).parent.mkdir(parents=True, exist_ok=True)
        self._stacks = folder.stacks(world.rank).open("w")
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)
        faulthandler.enable(self._stacks)  # and what it did when it crashed
        if world.local_rank == 0:
            self._start_watchdog(folder, hang_seconds)

    def beat(self, step: int | None = None) -> None:
        self._count += 1
        self._step = self._step if step is None else step
        BEAT.pack_into(self._memory, 0, self._count, time.monotonic(), self._step)

    def record_flight(self, folder: RunFolder) -> None:
        """Has NCCL remember its collectives, for when this rank hangs; before it joins the others."""
        flight_recorder.switch_on(folder, self.path.parent, self._rank)

    def end(self) -> None:
        """This rank ends by itself: the watchdog need not wonder."""
        self.path.unlink(missing_ok=True)
        flight_recorder.pipe_of(self.path.parent, self._rank).unlink(missing_ok=True)
        with suppress(OSError):  # the last one takes the folder along
            self.path.parent.rmdir()
        faulthandler.unregister(STACKS_SIGNAL)
        faulthandler.disable()
        self._stacks.close()
        if not Path(self._stacks.name).stat().st_size:
            Path(self._stacks.name).unlink()

    def _start_watchdog(self, folder: RunFolder, hang_seconds: float) -> None:
        arguments = (str(folder.root), str(self.path.parent), str(hang_seconds))
        command = module_command("z2all_ds.cluster.launch.watchdog", *arguments)
        start(command, is_owned=False, start_new_session=False)


def _write(path: Path, content: bytes) -> None:
    """Into its folder, which a rank of an earlier training, or its watchdog, may be removing at this moment."""
    for _ in range(WRITE_TRIES):
        with suppress(FileNotFoundError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            return
    raise MachineError(str(path), "cannot be written", "Set TMPDIR to a folder that nobody clears.")


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}"


def watch_folder(folder: RunFolder) -> Path:
    """One for the ranks of one launch on this node: they share a parent and the meeting point, and no other launch
    does."""
    parent = os.getppid()
    launch = (str(folder.root), parent, process_start_time(parent), os.environ.get("MASTER_PORT", ""))
    return private_temp_dir() / f"watch_{hashlib.sha256(repr(launch).encode()).hexdigest()[:16]}"


def _sweep(place: Path) -> None:
    """Nodes that lose their power leave folders behind."""
    for folder in place.glob("watch_*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > OLD_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
