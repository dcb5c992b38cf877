"""Paths inside a run folder, and the lock that keeps two jobs from writing to the same one."""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.console import say
from z2all_ds.base.errors import CheckpointError, ConfigError

LOCK, LAUNCH_LOCK = ".lock", ".launch_lock"
"""Files that every run has in its folder."""
LOCK_PATIENCE_SECONDS = 20.0
"""The last rank of a killed run needs a second or two to notice and exit; then its lock is released."""
SILENT_SECONDS = 2.0
POLL_SECONDS = 0.2
PRIVATE = 0o600
"""Mode of lock files: whoever can open a file can lock it."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, with all paths used in it."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "run.yaml"

    @property
    def ds_config(self) -> Path:
        return self.root / "ds_config.json"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def launch_config(self) -> Path:
        """The resolved config that a launch passes to its ranks."""
        return self.root / "launch" / "run.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def health(self) -> Path:
        """Cost of the last steps per rank, written every few seconds."""
        return self.root / "health.jsonl"

    @property
    def sinks(self) -> Path:
        """Data sent to W&B and TensorBoard, and the position of each sink."""
        return self.root / "sinks"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def data_states(self) -> Path:
        """Data states of all checkpoints, kept after a checkpoint is deleted; used to trace samples."""
        return self.root / "data_states"

    def data_state_files(self) -> dict[int, Path]:
        """Return the data states by step; files with other names are not of this package."""
        found = (
            (re.fullmatch(r"step_(\d{8,})\.json", path.name, re.ASCII), path) for path in self.data_states.glob("*")
        )
        return {int(name[1]): path for name, path in found if name}

    @property
    def lineage(self) -> Path:
        """Name the in-memory snapshots that the run may resume from."""
        return self.root / ".lineage"

    @property
    def exports(self) -> Path:
        return self.root / "exports"

    @property
    def evaluations(self) -> Path:
        """Results of `z2all evaluate` for the run's checkpoints."""
        return self.root / "evaluations"

    @property
    def plots(self) -> Path:
        return self.root / "plots"

    @property
    def profiles(self) -> Path:
        return self.root / "profiles"

    @property
    def stop_request(self) -> Path:
        """While this file exists, the run is requested to save and stop."""
        return self.root / "stop"

    @property
    def faults(self) -> Path:
        """Fault records of failed ranks."""
        return self.root / "logs" / "faults"

    def stacks(self, rank: int) -> Path:
        """Return the file for the stacks of a hung rank."""
        return self.root / "logs" / "stacks" / f"rank_{rank:04d}.txt"

    @property
    def flights(self) -> Path:
        """NCCL flight records of hung ranks."""
        return self.root / "logs" / "flight"

    def rank_log(self, rank: int) -> Path:
        return self.root / "logs" / f"rank_{rank:04d}.log"

    def acquire_lock(self, patience_seconds: float | None = None) -> int:
        """Lock the folder until the returned descriptor is closed or the process ends.

        `patience_seconds`: how long to wait for another job to end; default LOCK_PATIENCE_SECONDS.
        """
        self._refuse_checkpoints_of_others()
        return self._acquire(LOCK, patience_seconds)

    def _refuse_checkpoints_of_others(self) -> None:
        """Refuse a link to the checkpoints of another run: our lock does not keep that run from using them."""
        if not self.checkpoints.is_symlink():
            return
        other = RunFolder(Path(os.path.realpath(self.checkpoints)).parent)
        if other.config.exists() or (other.root / LOCK).exists():
            rule = f"is a link to the checkpoints of the run {other.root}"
            fix = "Remove the link, and start with --resume and a checkpoint of that run, or copy its folder."
            raise CheckpointError(f"{self.checkpoints}", rule, fix)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Keep other launches from this folder, and wait until no job writes to it. Ranks lock it themselves, since
        they may outlive their launcher or have another one."""
        self.require_ours()
        descriptor = self._acquire(LAUNCH_LOCK, None)
        try:
            os.close(self.acquire_lock())
            yield
        finally:
            os.close(descriptor)

    def require_ours(self) -> None:
        """Refuse a folder that no run has used and that has files under names of a run, which would be replaced."""
        files = (self.config, self.ds_config, self.environment, self.metrics, self.events, self.stop_request)
        found = [path for path in files if os.path.lexists(path)]
        was_run = {self.config, self.environment, self.events} <= set(found)  # a copy may lack the locks
        if found and not was_run and not any((self.root / name).is_file() for name in (LOCK, LAUNCH_LOCK)):
            rule = f"has {found[0].name}, which a run would replace, but was not written by a run"
            raise ConfigError(f"run_dir={self.root}", rule, "Use a new folder, or move that file.")

    def _acquire(self, name: str, patience_seconds: float | None) -> int:
        self.root.mkdir(parents=True, exist_ok=True)
        descriptor = open_lock_file(self.root / name)
        patience = LOCK_PATIENCE_SECONDS if patience_seconds is None else patience_seconds
        waiting = f"another job is writing to {self.root}: waiting up to {patience:.0f} s until it has ended"
        if wait_and_tell(descriptor, patience, waiting):
            return descriptor
        os.close(descriptor)
        raise CheckpointError(
            f"run folder {self.root}", "another job is writing to it", "Stop that job or set a different run_dir."
        )


def open_lock_file(path: Path) -> int:
    """Create or open a file for a lock of this user, and return its descriptor."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, PRIVATE)
    if os.fstat(descriptor).st_uid == os.getuid():
        with suppress(OSError):  # some file systems have no modes
            os.fchmod(descriptor, PRIVATE)  # it may be from an earlier version
    return descriptor


def wait_and_tell(descriptor: int, patience_seconds: float, line: str, operation: int = fcntl.LOCK_EX) -> bool:
    """Do the same as `wait_for_lock`, and print the line if it takes long."""
    if wait_for_lock(descriptor, min(patience_seconds, SILENT_SECONDS), operation):
        return True
    if patience_seconds <= SILENT_SECONDS:
        return False
    say(line)
    return wait_for_lock(descriptor, patience_seconds - SILENT_SECONDS, operation)


def wait_for_lock(descriptor: int, patience_seconds: float, operation: int = fcntl.LOCK_EX) -> bool:
    """Lock a file or folder; return False if another process prevents it for longer than this."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)
        else:
            return True
