"""Paths inside a run folder, and the lock that keeps two jobs from writing to the same one."""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from z2all_ds.base.console import say
from z2all_ds.base.errors import CheckpointError, ConfigError
from z2all_ds.base.json_text import load_json
from z2all_ds.base.storage.open_files import open_regular

LOCK, LAUNCH_LOCK = ".lock", ".launch_lock"
"""Files that every run has in its folder. The second also marks the folder as ours: many programs have a `.lock`."""
LAUNCH_FILES = ("run.yaml", "hostfile", "ssh_config", "deepspeed_env", "deepspeed_env_of_launch", "tasks", "rank.py")
"""Files that a launch writes into the folder `launch`."""
LOCK_PATIENCE_SECONDS = 20.0
"""The last rank of a killed run needs a second or two to notice and exit; then its lock is released."""
SILENT_SECONDS = 2.0
POLL_SECONDS = 0.2
MAX_EVENT_BYTES = 1 << 20
PRIVATE = 0o600
"""Mode of lock files: whoever can open a file can lock it."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, with all paths used in it."""

    root: Path
    lock_id: list[int] | None = field(default=None, compare=False)
    """Device and inode of the lock that this job holds, if it is known."""

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

    @property
    def is_lost(self) -> bool:
        """Whether the folder that this job locked was moved or deleted; another job may use one at its path."""
        try:
            return self.lock_id is not None and file_id(self.root / LOCK) != self.lock_id
        except OSError:  # the disk cannot be reached for now
            return False

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

    def claim(self) -> None:
        """Do the same as `require_ours`, and mark the folder as one that a run has used."""
        self.require_ours()
        self.root.mkdir(parents=True, exist_ok=True)
        os.close(open_lock_file(self.root / LAUNCH_LOCK))

    def require_ours(self) -> None:
        """Refuse a folder that no run has used and that has files under names of a run, which would be replaced."""
        records = (self.metrics, self.events, self.health, self.lineage, self.stop_request)
        launch = (self.launch_config.with_name(name) for name in LAUNCH_FILES)
        logs = self.root.glob("logs/launcher*.log")
        files = (self.config, self.ds_config, self.environment, *records, *launch, *logs)
        found = [path for path in files if os.path.lexists(path)]
        if found and not self._was_used():
            rule = f"has {found[0].relative_to(self.root)}, which a run would replace, but was not written by a run"
            raise ConfigError(f"run_dir={self.root}", rule, "Use a new folder, or move that file.")

    def _was_used(self) -> bool:
        """Return whether a run has used the folder: it has our mark or, as a copy may lack it, our files."""
        if (self.root / LAUNCH_LOCK).is_file() or any(self.checkpoints.glob("step_*/MANIFEST.json")):
            return True
        with suppress(OSError, ValueError), os.fdopen(open_regular(self.events), "rb") as events:
            first = load_json(events.readline(MAX_EVENT_BYTES))
            return isinstance(first, dict) and {"time_unix", "event"} <= first.keys()
        return False

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


def file_id(file: Path | int) -> list[int] | None:
    """Return device and inode of a file, given by its path or descriptor; None if it does not exist."""
    with suppress(FileNotFoundError, NotADirectoryError):
        found = os.stat(file)
        return [found.st_dev, found.st_ino]
    return None


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
