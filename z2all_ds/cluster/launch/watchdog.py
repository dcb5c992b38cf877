"""Watches the ranks of one node: `python -m z2all_ds.cluster.launch.watchdog RUN WATCH_FOLDER HANG_SECONDS [EVENTS]`.

The node's first rank starts it, under any launcher; it ends when the ranks have ended. It records a fault of the run
when a rank is gone without a record (killed) or has no heartbeat for too long (hang). For a hang, it has the stacks of
all ranks here written to RUN/logs/stacks and their last NCCL collectives to RUN/logs/flight. Then it ends the ranks,
since a launcher would wait forever. Loads no torch.

A launcher of ours records the failure of the run. If there is none, or it was killed, the watchdog of rank 0 does it
for ranks that could not. Only that one gets EVENTS, the number of the run's events before this launch.
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

from z2all_ds.base.errors import ClusterError, MachineError, Z2allError
from z2all_ds.base.fault_records import (
    BUG,
    HANG,
    KILLED,
    LAUNCH_VARIABLE,
    LOST_PEER,
    OUT_OF_MEMORY,
    Fault,
    cause_since,
    has_fault,
    write_fault,
)
from z2all_ds.base.machine import process_is_alive
from z2all_ds.base.run_folder import LAUNCH_LOCK, RunFolder, open_lock_file, wait_for_lock
from z2all_ds.track.writer import record_failed_launch
from z2all_ds.train.processes import flight_recorder
from z2all_ds.train.processes.progress import BEAT, STACKS_SIGNAL, file_name

POLL_SECONDS = 0.2
STACKS_SECONDS = 1.0
"""For ranks to write their stacks; the handler needs milliseconds."""
LAUNCHER_SECONDS = 20.0
"""For the launcher and the other ranks to end by themselves after one has ended."""
START_SECONDS = 300.0
"""Minimum time limit before the first step of a rank, in which it loads, compiles and restores."""

NCCL_ABORT = "ProcessGroupNCCL.cpp"
"""In the log of a rank that torch aborts because another one is gone or late."""
TAIL_BYTES = 20_000


@dataclass(frozen=True)
class RankState:
    """The heartbeat file of a rank."""

    number: int
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
        """True if it is stopped by SIGSTOP, a debugger, or a frozen container."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        return False


def read_ranks(folder: Path) -> dict[int, RankState]:
    """Return the ranks that have a heartbeat file, by number."""
    found: dict[int, RankState] = {}
    try:
        paths = sorted(folder.glob("rank_*"))
    except FileNotFoundError:  # the last rank has just removed it
        return found
    for path in paths:
        with suppress(OSError):  # a rank that is just ending
            content = path.read_bytes()
            beats, beat_at, step = BEAT.unpack_from(content)
            who = json.loads(content[BEAT.size :].rstrip(b"\0"))
            found[who["rank"]] = RankState(
                who["rank"], who["pid"], who["start_time"], Path(who["stacks"]), beats, beat_at, step
            )
    return found


class Watchdog:
    """The watchdog of one node."""

    def __init__(self, run: RunFolder, folder: Path, hang_seconds: float, events_before: int | None = None) -> None:
        self.run, self.folder, self.hang_seconds, self.events_before = run, folder, hang_seconds, events_before
        self.began_unix = time.time()
        self.host = socket.gethostname()
        self.kills_before = out_of_memory_kills()
        self.looked_at = self.awake_since = time.monotonic()

    def watch(self) -> None:
        """Return when no rank is left. The rank that has started this wrote its file before."""
        while found := self._look():
            ranks = list(found.values())
            gone = [rank for rank in ranks if not rank.is_alive]
            if gone:
                self._record_killed(gone)
                self._end([rank for rank in ranks if rank not in gone], grace_seconds=LAUNCHER_SECONDS)
            elif any(self._is_silent(rank) for rank in ranks):
                self._record_hang(ranks)
                self._end(ranks, grace_seconds=STACKS_SECONDS)
            else:
                wait_for_an_end(ranks)
                continue
            self._remove_files(list(found))
            if self.events_before is not None:
                self._record_failure(self.events_before)
            return

    def _look(self) -> dict[int, RankState]:
        """Read the heartbeats. If the last look was long ago, this node was paused or overloaded, and so were its
        ranks: silence counts from now on."""
        now = time.monotonic()
        if now - self.looked_at > self.hang_seconds / 4:
            self.awake_since = now
        self.looked_at = now
        return read_ranks(self.folder)

    def _remove_files(self, ranks: list[int]) -> None:
        for rank in ranks:
            (self.folder / file_name(rank)).unlink(missing_ok=True)
            flight_recorder.pipe_of(self.folder, rank).unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def _is_silent(self, rank: RankState) -> bool:
        limit = max(START_SECONDS, self.hang_seconds) if rank.step < 0 else self.hang_seconds
        return self.hang_seconds > 0 and self.looked_at - max(rank.beat_at, self.awake_since) > limit

    def _record_killed(self, gone: list[RankState]) -> None:
        for rank in gone:
            if has_fault(self.run, rank.number):
                continue
            kind: str = KILLED
            error: type[Z2allError] = ClusterError
            if out_of_memory_kills() > self.kills_before:
                kind, error, rule = OUT_OF_MEMORY, MachineError, "killed by the system, which was out of memory"
                fix = "Use less memory: a smaller micro-batch, another ZeRO JSON (`z2all plan`), or fewer loaders."
            elif crash := crash_of(rank.stacks):
                kind = LOST_PEER if NCCL_ABORT in tail_of(self.run.rank_log(rank.number)) else BUG
                rule, fix = f"crashed in step {rank.step + 1} ({crash})", f"See {rank.stacks}."
            else:
                rule = f"its process was killed from outside in step {rank.step + 1}"
                fix = "Find out what killed it."
            line = f"{error.__name__}: rank {rank.number}: {rule}. {fix}"
            write_fault(self.run, Fault(kind, rank.number, self.host, line, error.exit_code))

    def _record_hang(self, ranks: list[RankState]) -> None:
        stopped = {rank.number for rank in ranks if rank.is_stopped}
        for rank in ranks:
            with suppress(OSError):
                os.kill(rank.pid, STACKS_SIGNAL)
        time.sleep(STACKS_SECONDS)
        for rank in ranks:
            silent = time.monotonic() - rank.beat_at
            if rank.number in stopped:
                state = "its process is stopped. Find out why: a debugger, a signal, a frozen container."
            else:
                state = f"its stacks in {rank.stacks} show what it waits for. train.hang_seconds is the limit."
            line = f"ClusterError: rank {rank.number}: no heartbeat for {silent:.0f} s in step {rank.step + 1}"
            # The rank that is behind or stopped delays the others.
            weight = (10**9 if rank.number in stopped else 0) - rank.beats
            fault = Fault(HANG, rank.number, self.host, f"{line}; {state}", ClusterError.exit_code, weight)
            write_fault(self.run, fault)
        flight_recorder.ask_for(self.run, self.folder, [rank.number for rank in ranks if rank.number not in stopped])

    def _record_failure(self, events_before: int) -> None:
        """Record why the run has failed, unless a launcher of ours does it or the next job has begun."""
        fault = cause_since(self.run, self.began_unix)
        if fault is None:
            return
        if not os.environ.get(LAUNCH_VARIABLE):
            record_failed_launch(self.run, fault.line, events_before)
            return
        with suppress(OSError):
            launch_lock = open_lock_file(self.run.root / LAUNCH_LOCK)  # a launcher holds it as long as it lives
            try:
                if wait_for_lock(launch_lock, patience_seconds=0.0):
                    record_failed_launch(self.run, fault.line, events_before, is_cause=False)
            finally:
                os.close(launch_lock)

    def _end(self, ranks: list[RankState], grace_seconds: float) -> None:
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline and any(rank.is_alive for rank in ranks):
            time.sleep(POLL_SECONDS)
        for number in (signal.SIGTERM, signal.SIGKILL):
            alive = [rank for rank in ranks if rank.is_alive]
            for rank in alive:
                with suppress(OSError):
                    os.kill(rank.pid, signal.SIGKILL if rank.is_stopped else number)
            if alive:
                time.sleep(STACKS_SECONDS)


def wait_for_an_end(ranks: list[RankState]) -> None:
    """Wait for POLL_SECONDS, or until one of the ranks ends, so that the first to end is known."""
    waiting, handles = select.poll(), []
    try:
        for rank in ranks:
            with suppress(OSError):
                handles.append(os.pidfd_open(rank.pid))
                waiting.register(handles[-1], select.POLLIN)
        waiting.poll(POLL_SECONDS * 1000)
    finally:
        for handle in handles:
            os.close(handle)


def crash_of(stacks: Path) -> str:
    """Return how a rank crashed (`Segmentation fault`, `Aborted` ...); empty if it did not crash."""
    with suppress(OSError):
        found = re.search(r"^Fatal Python error: (.*)$", stacks.read_text(errors="replace"), re.MULTILINE)
        return found[1] if found else ""
    return ""


def tail_of(log: Path) -> str:
    with suppress(OSError):
        return log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
    return ""


def out_of_memory_kills() -> int:
    """Return the processes of this container that the kernel has killed when out of memory (cgroup v2)."""
    try:
        lines = Path("/sys/fs/cgroup/memory.events").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except (OSError, StopIteration, ValueError):
        return 0


def main(run: str, folder: str, hang_seconds: str, events_before: str | None = None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the ranks; this ends after them
        signal.signal(number, signal.SIG_IGN)
    events = None if events_before is None else int(events_before)
    Watchdog(RunFolder(Path(run)), Path(folder), float(hang_seconds), events).watch()


if __name__ == "__main__":
    main(*sys.argv[1:])
