"""Where the time of a step goes: waiting for data, forward pass, backward pass, optimizer.

Borders are marked as the loop passes them. On a CPU a mark is the clock. On a GPU it is an event in the stream, so a
part lasts from the moment the GPU came to its beginning to the moment it came to its end, wherever the host is by then;
waiting for data is then the time in which the GPU stood still for want of a batch, not the time the host waited. Around
the replay of a CUDA graph events work as around single kernels.

Measuring never waits: at the end of a step the loop has read its loss, so most events are past and are read; what the
GPU has not come to yet is added to the next step. Over several steps nothing is missing and nothing counted twice.

Communication is inside these parts and is measured beside them (`communication.py`).
"""

from typing import Any

import torch

from z2all_ds.train.meters.timers import timer_for

PARTS = ("data_wait", "forward", "backward", "optimizer")
BETWEEN = "between"
"""From the end of a step's last part to the beginning of the next step: no part of either."""


class TimeSplit:
    """The parts of step after step: `begin()`, `done(part)` at the end of each, `take()` at the step's end."""

    def __init__(self, device: torch.device) -> None:
        self._timer = timer_for(device)
        self._marks: list[tuple[str, Any]] = []
        """Each with what was done up to it."""

    def begin(self) -> None:
        """Of a step. Marks that were not past at the last `take` are still there, before this one."""
        self._marks.append((BETWEEN, self._timer.mark()))

    def done(self, part: str) -> None:
        """What was computed since the last mark was this; a part may come many times in a step."""
        assert part in PARTS and self._marks, (part, len(self._marks))
        self._marks.append((part, self._timer.mark()))

    def take(self) -> dict[str, float]:
        """Seconds of each part of this step, as far as the device has come, and of what the last call left over."""
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
