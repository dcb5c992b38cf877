"""Learning rate as a pure function of the step: nothing to save, nothing to restore, no jump after a resume."""

import math

from z2all_ds.config import ScheduleSection


def learning_rate(step: int, total_steps: int, peak: float, schedule: ScheduleSection) -> float:
    """Rate of optimizer step `step` (from 0). Warm-up ends on the peak at step warmup_steps - 1."""
    if step < schedule.warmup_steps:
        return peak * ((step + 1) / schedule.warmup_steps)  # the share first: it ends on exactly 1
    if schedule.kind == "constant":
        return peak
    lowest = peak * schedule.min_ratio
    # The last step (total_steps - 1) gets the lowest rate exactly.
    span = max(1, total_steps - 1 - schedule.warmup_steps)
    share_done = min(1.0, (step - schedule.warmup_steps) / span)
    height = 1 - share_done if schedule.kind == "linear" else 0.5 * (1 + math.cos(math.pi * share_done))
    # Exact at both ends, where `lowest + (peak - lowest) * height` rounds; in between rounding may not leave the range.
    return min(peak, max(lowest, peak * height + lowest * (1 - height)))
