"""Splits the time of a step: waiting for data, forward pass, backward pass, optimizer.

The loop marks the boundaries. On a CPU a mark is a clock reading. On a GPU it is an event in the stream, so a part
lasts from when the GPU reaches its beginning until it reaches its end, independent of the host; data wait is the time
the GPU was idle without a batch, not the time the host waited. This also works around the replay of a CUDA graph.

Measuring never synchronizes: at the end of a step the loop has read the loss, so most events are complete and can be
read; the rest is added to the next step. Over several steps nothing is missing or counted twice.

Communication is included in these parts and also measured separately (`communication.py`).
"""

from typing import Any

import torch

from z2all_ds.train.meters.timers import timer_for

PARTS = ("data_wait", "forward", "backward", "optimizer")
BETWEEN = "between"
"""From the end of a step's last part to the beginning of the next step; not a part of either."""


class TimeSplit:
    """Measures the parts of each step: `begin()`, `done(part)` after each part, `take()` at the end of the step."""

    def __init__(self, device: torch.device) -> None:
        self._timer = timer_for(device)
        self._marks: list[tuple[str, Any]] = []
        """Each mark with the name of the part before it."""

    def begin(self) -> None:
        """Begin a step. Marks that were not complete at the last `take` are kept before this one."""
        self._marks.append((BETWEEN, self._timer.mark()))

    def done(self, part: str) -> None:
        """Assign the time since the last mark to this part; a part may occur several times per step."""
        assert part in PARTS and self._marks, (part, len(self._marks))
        self._marks.append((part, self._timer.mark()))

    def take(self) -> dict[str, float]:
        """Return the seconds per part of this step that the device has completed, plus the rest of the last call."""
        seconds = dict.fromkeys((*PARTS, BETWEEN), 0.0)
        past = 0
        while past + 1 < len(self._marks) and self._timer.is_past(self._marks[past + 1][1]):
            (_, begin), (part, end) = self._marks[past : past + 2]
            seconds[part] += self._timer.seconds(begin, end)
            past += 1
        all_past = past + 1 == len(self._marks)
        for _, mark in self._marks[: past + all_past]:
            self._timer.give_back(mark)
        self._marks = self._marks[past + all_past :]
        return {part: seconds[part] for part in PARTS}
