"""Looks after the ranks of one node: `python -m z2all_ds.cluster.launch.watchdog RUN WATCH_FOLDER HANG_SECONDS`.

Started by the node's first rank, under any launcher; ends when the ranks have. What it sees, it writes down as faults
of the run: a rank that is gone without a word was killed; one that gives no sign of life for too long hangs. Then the
stacks of all ranks here are written to RUN/logs/stacks, and what they had asked NCCL for to RUN/logs/flight; then the
ranks are ended: a launcher alone would wait for ever. Loads no torch.
"""

import json
import os
import re
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.errors import ClusterError, MachineError
from z2all_ds.base.fault_records import BUG, HANG, KILLED, LOST_PEER, OUT_OF_MEMORY, Fault, has_fault, write_fault
from z2all_ds.base.machine import process_is_alive
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.train.processes import flight_recorder
from z2all_ds.train.processes.progress import BEAT, STACKS_SIGNAL, file_name

LOOK_EVERY_SECONDS = 0.2
STACKS_SECONDS = 1.0
"""For ranks to write them; a busy handler needs milliseconds."""
LAUNCHER_SECONDS = 20.0
"""For the launcher and the other ranks to end by themselves, when one is gone."""
START_SECONDS = 300.0
"""Before its first step a rank may be silent for so long at least: it loads, compiles, restores."""

NCCL_GAVE_UP = "ProcessGroupNCCL.cpp"
"""In the log of a rank that torch aborts because another one is gone or late."""
TAIL_BYTES = 20_000


@dataclass(frozen=True)
class Seen:
    """A rank's file, as it was at a look."""

    rank: int
    pid: int
    start_time: int | None
    stacks: Path
    beats: int
    beat_at: float
    step: int

    @property
    def is_alive(self) -> bool:
        return process_is_alive(self.pid, self.start_time)

    @property
    def is_stopped(self) -> bool:
        """By SIGSTOP, a debugger, or a frozen container."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        return False


def look(folder: Path) -> dict[int, Seen]:
    """All ranks that are there, by number."""
    found = {}
    for path in sorted(folder.glob("rank_*")):
        with suppress(OSError, ValueError):  # one that has just begun or ended
            content = path.read_bytes()
            beats, beat_at, step = BEAT.unpack_from(content)
            who = json.loads(content[BEAT.size :].rstrip(b"\0"))
            found[who["rank"]] = Seen(
                who["rank"], who["pid"], who["start_time"], Path(who["stacks"]), beats, beat_at, step
            )
    return found


class Watchdog:
    """One node's."""

    def __init__(self, run: RunFolder, folder: Path, hang_seconds: float) -> None:
        self.run, self.folder, self.hang_seconds = run, folder, hang_seconds
        self.host = socket.gethostname()
        self.kills_before = out_of_memory_kills()

    def watch(self) -> None:
        """Returns when no rank is left to look after. The one that has started this was there before it."""
        while now := look(self.folder):
            gone = [seen for seen in now.values() if not seen.is_alive]
            silent = [seen for seen in now.values() if self._is_silent(seen)]
            if gone:
                self._tell_killed(gone)
                self._end([seen for seen in now.values() if seen not in gone], grace_seconds=LAUNCHER_SECONDS)
                self._forget(now)
                return
            if silent:
                self._tell_hang(list(now.values()))
                self._end(list(now.values()), grace_seconds=STACKS_SECONDS)
                self._forget(now)
                return
            wait_for_an_end(list(now.values()))

    def _forget(self, ranks: dict[int, Seen]) -> None:
        for rank in ranks:
            (self.folder / file_name(rank)).unlink(missing_ok=True)
            flight_recorder.pipe_of(self.folder, rank).unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def _is_silent(self, seen: Seen) -> bool:
        limit = max(START_SECONDS, self.hang_seconds) if seen.step < 0 else self.hang_seconds
        return self.hang_seconds > 0 and time.monotonic() - seen.beat_at > limit

    def _tell_killed(self, gone: list[Seen]) -> None:
        for seen in gone:
            if has_fault(self.run, seen.rank):
                continue
            if out_of_memory_kills() > self.kills_before:
                line = f"MachineError: rank {seen.rank}: killed by the system, which had no memory left"
                fix = "Use less memory: a smaller micro-batch, another ZeRO JSON (`z2all plan`), or fewer loaders."
                fault = Fault(OUT_OF_MEMORY, seen.rank, self.host, f"{line}. {fix}", MachineError.exit_code)
            elif crash := crash_of(seen.stacks):
                kind = LOST_PEER if NCCL_GAVE_UP in tail_of(self.run.rank_log(seen.rank)) else BUG
                line = f"ClusterError: rank {seen.rank}: crashed in step {seen.step + 1} ({crash})"
                fault = Fault(kind, seen.rank, self.host, f"{line}. See {seen.stacks}.", ClusterError.exit_code)
            else:
                line = f"ClusterError: rank {seen.rank}: its process was killed from outside in step {seen.step + 1}"
                fault = Fault(KILLED, seen.rank, self.host, f"{line}. Look for who did it.", ClusterError.exit_code)
            write_fault(self.run, fault)

    def _tell_hang(self, ranks: list[Seen]) -> None:
        stopped = {seen.rank for seen in ranks if seen.is_stopped}
        for seen in ranks:
            with suppress(OSError):
                os.kill(seen.pid, STACKS_SIGNAL)
        time.sleep(STACKS_SECONDS)
        for seen in ranks:
            silent = time.monotonic() - seen.beat_at
            if seen.rank in stopped:
                state = "its process is stopped. Find out by whom: a debugger, a signal, a frozen container."
            else:
                state = (
                    f"its stacks are in {seen.stacks}. Look there for what it waits for (train.hang_seconds limits it)."
                )
            line = f"ClusterError: rank {seen.rank}: no sign of life for {silent:.0f} s in step {seen.step + 1}"
            # Who is behind, or stopped, holds up the others.
            weight = (10**9 if seen.rank in stopped else 0) - seen.beats
            fault = Fault(HANG, seen.rank, self.host, f"{line}; {state}", ClusterError.exit_code, weight)
            write_fault(self.run, fault)
        flight_recorder.ask_for(self.run, self.folder, [seen.rank for seen in ranks if seen.rank not in stopped])

    def _end(self, ranks: list[Seen], grace_seconds: float) -> None:
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline and any(seen.is_alive for seen in ranks):
            time.sleep(LOOK_EVERY_SECONDS)
        for number in (signal.SIGTERM, signal.SIGKILL):
            alive = [seen for seen in ranks if seen.is_alive]
            for seen in alive:
                with suppress(OSError):
                    os.kill(seen.pid, signal.SIGKILL if seen.is_stopped else number)
            if alive:
                time.sleep(STACKS_SECONDS)


def wait_for_an_end(ranks: list[Seen]) -> None:
    """Until the next look, or until one of the ranks ends: whoever ends first is to be known."""
    waiting, handles = select.poll(), []
    try:
        for seen in ranks:
            with suppress(OSError):
                handles.append(os.pidfd_open(seen.pid))
                waiting.register(handles[-1], select.POLLIN)
        waiting.poll(LOOK_EVERY_SECONDS * 1000)
    finally:
        for handle in handles:
            os.close(handle)


def crash_of(stacks: Path) -> str:
    """What Python called a rank that crashed: `Segmentation fault`, `Aborted` ...; empty where it did not crash."""
    with suppress(OSError):
        found = re.search(r"^Fatal Python error: (.*)$", stacks.read_text(errors="replace"), re.MULTILINE)
        return found[1] if found else ""
    return ""


def tail_of(log: Path) -> str:
    with suppress(OSError):
        return log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
    return ""


def out_of_memory_kills() -> int:
    """Processes of this container that the kernel has killed for want of memory (cgroup v2)."""
    try:
        lines = Path("/sys/fs/cgroup/memory.events").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except (OSError, StopIteration, ValueError):
        return 0


def main(run: str, folder: str, hang_seconds: str) -> None:
    # Both are for the ranks: when they have ended, so has this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Watchdog(RunFolder(Path(run)), Path(folder), float(hang_seconds)).watch()


if __name__ == "__main__":
    main(*sys.argv[1:])
