"""Checks the loss and gradient norm of each optimizer step before the weights are changed.

The loss is read only here, at the gate before the optimizer step (`step_gate.py`).
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from z2all_ds.base.config.sections import GuardSection
from z2all_ds.track.fields import LOSS_PREFIX
from z2all_ds.train.guard.spike_guard import GRAD_NORM, LOSS, Outlier, SpikeGuard
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
    is_bad: bool = False
    """Whether the guard's policy applies, and not only a warning."""
    has_new_level: bool = False
    """Whether this was one bad step too many: the guard now learns the level again."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Per domain, by the names of `values`."""

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(value) for value in self.values.values())

    @property
    def values(self) -> dict[str, float]:
        """Values by the names of metrics.jsonl."""
        domains = {LOSS_PREFIX + name: loss for name, loss in self.per_domain.items()}
        return {LOSS: self.loss, **domains, **({} if self.grad_norm is None else {GRAD_NORM: self.grad_norm})}


class GuardedSteps:
    """Sits between an engine and its optimizer; call `finish` after each step of the engine."""

    def __init__(self, engine: Any, channel_loss: ChannelLoss, section: GuardSection, scales_loss: bool) -> None:
        """`scales_loss`: fp16, where DeepSpeed adjusts the loss scale by skipping steps that overflow."""
        self.guard = SpikeGuard(section)
        self._channel_loss, self._section, self._scales_loss = channel_loss, section, scales_loss
        self._figures: StepFigures | None = None
        self._gate = StepGate(engine, self._allows)

    def finish(self) -> StepFigures:
        """Return the figures of the step. Good steps are added to the baseline, bad steps are counted."""
        if self._gate.take_answer() is None:  # DeepSpeed skipped the optimizer: the gradient is not finite
            self._figures = self._look(None if self._scales_loss else math.inf)
        figures, self._figures = self._figures, None
        assert figures is not None
        if figures.taken and not figures.is_bad:
            self.guard.accept(figures.values, figures.tokens)
        return replace(figures, has_new_level=self.guard.count(figures.is_bad))

    def _allows(self, grad_norm: float | None) -> bool:
        figures = self._look(grad_norm)
        finite = all(math.isfinite(outlier.value) for outlier in figures.outliers)
        allowed = not figures.is_bad or (self._section.policy == "warn" and finite)
        self._figures = replace(figures, taken=allowed)
        return allowed

    def _look(self, grad_norm: float | None) -> StepFigures:
        loss, per_domain = self._channel_loss.take()
        tokens = {LOSS_PREFIX + name: count for name, count in self._channel_loss.tokens.items()}
        figures = StepFigures(loss, per_domain, grad_norm, tokens=tokens)
        outliers = tuple(self.guard.outliers(figures.values, tokens))
        return replace(figures, outliers=outliers, is_bad=any(map(self._is_acted_on, outliers)))

    def _is_acted_on(self, outlier: Outlier) -> bool:
        is_warned_of = outlier.is_of_domain and outlier.limit is not None and self._section.domain_policy == "warn"
        return not is_warned_of
