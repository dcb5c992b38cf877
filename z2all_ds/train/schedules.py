"""Learning rate as a pure function of the steps done: nothing to restore, and no jump after a resume.

Warm-up, then the shape of `schedule.kind`; a stage with `anneal` lowers the rate from its current value to the minimum.
Progress is counted in steps or in tokens; steps may differ in tokens.

A resume with changed settings could still make the rate jump (more steps under cosine, another peak), so a checkpoint
stores the rates around it, and `check_no_jump` compares them with those of the current settings.
"""

import math
from collections.abc import Callable
from typing import Any

from z2all_ds.base.config.sections import AnnealShape, ScheduleSection
from z2all_ds.base.config.stages import RunStage, progress
from z2all_ds.base.errors import ConfigError

HEIGHTS: dict[AnnealShape, Callable[[float], float]] = {
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
    "linear": lambda share: 1 - share,
    "one_minus_sqrt": lambda share: 1 - math.sqrt(share),
}
"""From 1 to 0 while the fraction done goes from 0 to 1."""
LAST_RATE, NEXT_RATE = "lr_of_last_step", "lr_of_next_step"
"""Keys in a checkpoint's trainer.json."""
ROUNDING = 1e-9
"""Relative. The same settings give the same bits; steps instead of tokens give the same ratios up to rounding."""


def learning_rate(step: int, stages: list[RunStage], peak: float, schedule: ScheduleSection) -> float:
    """Return the rate of step `step` (from 0). The warm-up ends at the peak, a decay's last step at the minimum."""
    annealing = next((stage for stage in stages if stage.anneal and stage.first_step <= step), None)
    if annealing is None or annealing.anneal is None:
        return _rate_of_kind(step, stages, peak, schedule)
    first, end = annealing.first_step, annealing.end_step
    highest = _rate_of_kind(first - 1, stages, peak, schedule) if first else peak
    begin, after, last = (progress(stages, schedule.by, steps) for steps in (first, step + 1, end))
    return _decayed(highest, peak * schedule.min_ratio, annealing.anneal, (after - begin) / (last - begin))


def rates_around(step: int, stages: list[RunStage], peak: float, schedule: ScheduleSection) -> dict[str, float]:
    """Return the rates that a checkpoint after `step` steps stores."""
    last, following = (learning_rate(number, stages, peak, schedule) for number in (max(0, step - 1), step))
    return {LAST_RATE: last, NEXT_RATE: following}


def check_no_jump(
    saved: dict[str, Any], step: int, stages: list[RunStage], peak: float, schedule: ScheduleSection
) -> str | None:
    """Raise if the rate would jump after `step` steps; if jumps are allowed, return a line that reports it.

    One matching rate is enough: a run that was about to decay may be extended. Its next rate then differs, but the last
    one is on the new curve, which has no jumps itself.
    """
    now = rates_around(step, stages, peak, schedule)
    # Older checkpoints store no rates.
    if any(name not in saved or math.isclose(saved[name], now[name], rel_tol=ROUNDING) for name in now):
        return None
    what = f"learning rate {now[NEXT_RATE]:.6g} for step {step + 1}"
    rule = f"the checkpoint's settings give {saved[NEXT_RATE]:.6g}, after {saved[LAST_RATE]:.6g} in step {step}"
    if schedule.allow_jump:
        return f"{what}: {rule} (schedule.allow_jump)"
    batch = ", batch" if schedule.by == "tokens" else ""
    kept = f"Restore optimizer.lr, schedule, stages{batch} and train.steps"
    raise ConfigError(what, rule, f"{kept}, or set schedule.allow_jump=true.")


def _rate_of_kind(step: int, stages: list[RunStage], peak: float, schedule: ScheduleSection) -> float:
    def done(steps: int) -> int:
        return progress(stages, schedule.by, steps)

    warmup, total_steps = schedule.warmup or 0, stages[-1].end_step
    before, after = done(step), done(step + 1)
    if before < warmup:
        return peak * min(1.0, after / warmup)  # the ratio first: it ends at exactly 1
    lowest = peak * schedule.min_ratio
    match schedule.kind:
        case "constant":
            return peak
        case "inverse_sqrt":
            # Without a warm-up the first step counts as the warm-up.
            return max(lowest, peak * math.sqrt(min(1.0, max(warmup, done(1)) / max(1, before))))
        case "wsd":
            decay = schedule.decay
            assert decay is not None
            return _decayed(peak, lowest, schedule.decay_shape, (after - (done(total_steps) - decay)) / decay)
        case "cosine" | "linear" | "one_minus_sqrt":
            # From the peak in the first step after the warm-up to the minimum in the last step of the run.
            span = max(1, done(total_steps - 1) - warmup)
            return _decayed(peak, lowest, schedule.kind, (before - warmup) / span)


def _decayed(highest: float, lowest: float, shape: AnnealShape, share_done: float) -> float:
    height = HEIGHTS[shape](min(1.0, max(0.0, share_done)))
    # Exact at both ends, where `lowest + (highest - lowest) * height` rounds; clamped to the range in between.
    return min(highest, max(lowest, highest * height + lowest * (1 - height)))
