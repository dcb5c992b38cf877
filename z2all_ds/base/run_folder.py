"""Paths inside a run folder, and the lock that keeps two jobs from writing to the same one."""

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.errors import CheckpointError

LOCK_PATIENCE_SECONDS = 20.0
"""The last rank of a killed run needs a second or two to notice and exit; then its lock is released."""


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
                        "another job is writing to it",
                        "Stop that job or set a different run_dir.",
                    ) from None
                time.sleep(0.2)
            else:
                return descriptor
