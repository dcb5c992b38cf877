"""Names inside a run folder, and the lock that keeps two jobs from writing into one."""

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.errors import CheckpointError

LOCK_PATIENCE_SECONDS = 20.0
"""A killed run's last rank needs a second or two to notice that its owner is gone; then its lock is free."""


@dataclass(frozen=True)
class RunFolder:
    """One run's folder; every path in it has its name here."""

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
        """The resolved config that a launch hands to its ranks."""
        return self.root / "launch" / "run.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def health(self) -> Path:
        """What each rank's last steps cost it, every few seconds."""
        return self.root / "health.jsonl"

    @property
    def sinks(self) -> Path:
        """What W&B and TensorBoard were given, and how far each has come."""
        return self.root / "sinks"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def data_states(self) -> Path:
        """The data state of every checkpoint there was, kept when the checkpoint goes: a sample is traced from them."""
        return self.root / "data_states"

    @property
    def lineage(self) -> Path:
        """Names the snapshots in memory that the run may go on from."""
        return self.root / ".lineage"

    @property
    def exports(self) -> Path:
        return self.root / "exports"

    @property
    def evaluations(self) -> Path:
        """What verbs of `z2all evaluate` found of its checkpoints."""
        return self.root / "evaluations"

    @property
    def plots(self) -> Path:
        return self.root / "plots"

    @property
    def profiles(self) -> Path:
        return self.root / "profiles"

    @property
    def stop_request(self) -> Path:
        """While it is there, the run is asked to save and stop."""
        return self.root / "stop"

    @property
    def faults(self) -> Path:
        """What ranks that failed have left."""
        return self.root / "logs" / "faults"

    def stacks(self, rank: int) -> Path:
        """What a rank that hangs was doing."""
        return self.root / "logs" / "stacks" / f"rank_{rank:04d}.txt"

    @property
    def flights(self) -> Path:
        """What ranks that hang had asked NCCL for."""
        return self.root / "logs" / "flight"

    def rank_log(self, rank: int) -> Path:
        return self.root / "logs" / f"rank_{rank:04d}.log"

    def acquire_lock(self, patience_seconds: float | None = None) -> int:
        """Keeps other jobs out until the returned descriptor is closed or the process ends, however it ends.

        `patience_seconds`: how long to wait for another job's end; default LOCK_PATIENCE_SECONDS.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.root / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        patience = LOCK_PATIENCE_SECONDS if patience_seconds is None else patience_seconds
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    raise CheckpointError(
                        f"run folder {self.root}",
                        "another job is writing into it",
                        "Stop that job or set another run_dir.",
                    ) from None
                time.sleep(0.2)
            else:
                return descriptor
