"""Checks the loss and gradient norm of each optimizer step before the weights are changed.

The loss is read only here, at the gate before the optimizer step (`step_gate.py`).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from z2all_ds.base.config.sections import GuardSection
from z2all_ds.track.fields import LOSS_PREFIX
from z2all_ds.train.guard.spike_guard import GRAD_NORM, Outlier, SpikeGuard
from z2all_ds.train.meters.channel_loss import ChannelLoss
from z2all_ds.zero.step_gate import StepGate


@dataclass(frozen=True)
class StepFigures:
    """Loss and gradient norm of one step, over all ranks."""

    loss: float
    per_domain: dict[str, float]
    grad_norm: float | None
    taken: bool = False
    """Whether the weights were changed."""
    outliers: tuple[Outlier, ...] = ()

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(value) for value in self.values.values())

    @property
    def values(self) -> dict[str, float]:
        """Values by the names of metrics.jsonl."""
        domains = {LOSS_PREFIX + name: loss for name, loss in self.per_domain.items()}
        return {"loss": self.loss, **domains, **({} if self.grad_norm is None else {GRAD_NORM: self.grad_norm})}


class GuardedSteps:
    """Sits between an engine and its optimizer; call `finish` after each step of the engine."""

    def __init__(self, engine: Any, channel_loss: ChannelLoss, section: GuardSection, scales_loss: bool) -> None:
        """`scales_loss`: fp16, where DeepSpeed adjusts the loss scale by skipping steps that overflow."""
        self.guard = SpikeGuard(section)
        self._channel_loss, self._policy, self._scales_loss = channel_loss, section.policy, scales_loss
        self._figures: StepFigures | None = None
        self._gate = StepGate(engine, self._allows)

    def finish(self) -> StepFigures:
        """Return the figures of the step. Good steps are added to the baseline, bad steps are counted."""
        if self._gate.take_answer() is None:  # DeepSpeed skipped the optimizer: the gradient is not finite
            self._figures = self._look(None if self._scales_loss else math.inf)
        figures, self._figures = self._figures, None
        assert figures is not None
        self.guard.count(bad=bool(figures.outliers))
        if figures.taken and not figures.outliers:
            self.guard.accept(figures.values)
        return figures

    def _allows(self, grad_norm: float | None) -> bool:
        figures = self._look(grad_norm)
        finite = all(math.isfinite(outlier.value) for outlier in figures.outliers)
        allowed = not figures.outliers or (self._policy == "warn" and finite)
        self._figures = replace(figures, taken=allowed)
        return allowed

    def _look(self, grad_norm: float | None) -> StepFigures:
        loss, per_domain = self._channel_loss.take()
        figures = StepFigures(loss, per_domain, grad_norm)
        return replace(figures, outliers=tuple(self.guard.outliers(figures.values)))
