"""Base class of hooks: features called by the training loop, at the same points on every rank."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.stages import RunStage

if TYPE_CHECKING:
    from z2all_ds.train.context import TrainContext
    from z2all_ds.train.guard.guarded_steps import StepFigures


@dataclass(frozen=True)
class Step:
    """One finished optimizer step."""

    number: int
    """Starts at 1."""
    stage: RunStage
    lr: float
    figures: "StepFigures"
    record: dict[str, float] = field(default_factory=dict)
    """Fields that hooks add to the step's line in metrics.jsonl."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time that hooks took or measured, by part of the step."""

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time spent inside to a part."""
        started = time.monotonic()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - started


class Hook:
    """Does nothing; subclasses override what they need. `registry.py` lists the hooks."""

    def __init__(self, context: "TrainContext") -> None:
        self.context = context

    @classmethod
    def is_wanted(cls, run: RunConfig) -> bool:
        """Return whether this run uses the hook. Must be the same on all ranks."""
        return True

    def on_start(self) -> None:
        """Called after the checkpoint is restored, before the first step."""

    def before_step(self, number: int) -> None:
        """Called before step `number`."""

    def after_step(self, step: Step) -> None:
        """Called when the step is done, before its record is written: fields can be added."""

    def after_record(self, step: Step) -> None:
        """Called when the step is recorded. A hook that rolls back to a checkpoint does so here."""

    def on_checkpoint(self, step: int, name: str) -> None:
        """Called when the checkpoint of that step is complete on disk."""

    def on_end(self, outcome: str) -> None:
        """Called after the last step with `done`, `stopped` (as planned) or `requeue`. Not called after an error."""

    def close(self) -> None:
        """End threads and close files; also called after an error."""
