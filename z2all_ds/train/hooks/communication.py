"""Time per step spent in collectives, as seen by their callers.

DeepSpeed sends everything through one object, whose functions are wrapped here. A collective counts from its call to
its return. An asynchronous one also counts while its end is waited for: time overlapped by computation is not included.
On a GPU, events in the caller's stream mark the times; DeepSpeed's own comms logger synchronizes at every call.

All of it is also part of the forward, backward or optimizer time. It includes waiting for slower ranks.
"""

from collections.abc import Callable
from typing import Any

import torch

from z2all_ds.train.context import TrainContext
from z2all_ds.train.hooks.hook import Hook, Step
from z2all_ds.train.meters.timers import timer_for
from z2all_ds.zero.engine import collectives_of_deepspeed

COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "inference_all_reduce", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "broadcast", "all_to_all_single"),
    *("all_gather", "all_gather_into_tensor", "all_gather_base", "all_gather_coalesced"),
)


class CommunicationTime:
    """Measures from its creation until `close`."""

    def __init__(self, backend: Any, device: torch.device, world_size: int) -> None:
        """`backend` has the collectives as methods. Nothing is wrapped if the world size is 1."""
        self._backend, self._timer = backend, timer_for(device)
        self._spans: list[tuple[Any, Any]] = []
        self._inside = False
        self._wrapped = [name for name in COLLECTIVES if world_size > 1 and hasattr(backend, name)]
        for name in self._wrapped:
            setattr(backend, name, self._timed(getattr(backend, name)))

    def _timed(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside:  # a collective may call others
                return real(*arguments, **named)
            self._inside, begin = True, self._timer.mark()
            try:
                pending = real(*arguments, **named)
            finally:
                self._inside = False
                self._spans.append((begin, self._timer.mark()))
            return _Pending(pending, self._timed(pending.wait)) if hasattr(pending, "wait") else pending

        return timed

    def take(self) -> float:
        """Return the seconds since the last call that the device has completed; the rest is in the next call."""
        past = [self._timer.is_past(end) for _, end in self._spans]
        seconds = 0.0
        for (begin, end), is_past in zip(self._spans, past, strict=True):
            if is_past:
                seconds += self._timer.seconds(begin, end)
                self._timer.give_back(begin)
                self._timer.give_back(end)
        self._spans = [span for span, is_past in zip(self._spans, past, strict=True) if not is_past]
        return seconds

    def close(self) -> None:
        for name in self._wrapped:
            delattr(self._backend, name)  # restores the method of the class


class CommunicationMeter(Hook):
    """Records the time of a step's collectives."""

    def __init__(self, context: TrainContext) -> None:
        super().__init__(context)
        self._time = CommunicationTime(collectives_of_deepspeed(), context.engine.device, context.world.world_size)

    def after_step(self, step: Step) -> None:
        step.seconds["communication"] = self._time.take()

    def close(self) -> None:
        self._time.close()


class _Pending:
    """A running collective whose `wait` is timed; other attributes are those of the real object."""

    def __init__(self, real: Any, wait: Callable[..., Any]) -> None:
        self._real, self.wait = real, wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
