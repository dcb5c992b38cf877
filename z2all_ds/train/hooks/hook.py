"""What a hook is: a feature beside the training loop. The loop calls all hooks at the same points on every rank."""

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
    """One optimizer step that is done."""

    number: int
    """From 1 on."""
    stage: RunStage
    lr: float
    figures: "StepFigures"
    record: dict[str, float] = field(default_factory=dict)
    """What hooks add to the step's line in metrics.jsonl."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time that hooks took or measured, by part of the step."""

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the time inside to a part."""
        started = time.monotonic()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - started


class Hook:
    """Does nothing; a hook overrides what it needs. `registry.py` lists the hooks."""

    def __init__(self, context: "TrainContext") -> None:
        self.context = context

    @classmethod
    def is_wanted(cls, run: RunConfig) -> bool:
        """Whether this run uses it. Must be the same on all ranks."""
        return True

    def on_start(self) -> None:
        """The checkpoint is restored; the first step is next."""

    def before_step(self, number: int) -> None:
        """Step `number` is next."""

    def after_step(self, step: Step) -> None:
        """The step is done, its record is not written yet: fields can be added."""

    def after_record(self, step: Step) -> None:
        """The step is on record. A hook that goes back to a checkpoint does it here."""

    def on_checkpoint(self, step: int, name: str) -> None:
        """The checkpoint of that step is complete on the disk."""

    def on_end(self, outcome: str) -> None:
        """The last step is done: `done`, `stopped` as planned, or `requeue`. Not called after an error."""

    def close(self) -> None:
        """Ends threads and files; also after an error."""
