"""Timestamps of a device's work without synchronization: the clock on a CPU, stream events on a GPU."""

import time
from typing import Any, Protocol

import torch


class Timer(Protocol):
    """Records marks and returns the time between them later."""

    def mark(self) -> Any: ...

    def is_past(self, mark: Any) -> bool: ...

    def seconds(self, begin: Any, end: Any) -> float: ...

    def give_back(self, mark: Any) -> None: ...


def timer_for(device: torch.device) -> Timer:
    return DeviceTimer() if device.type == "cuda" else HostTimer()


class HostTimer:
    """CPU work is complete when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def is_past(self, mark: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def give_back(self, mark: float) -> None: ...


class DeviceTimer:
    """Events of the current stream, reused in every step."""

    def __init__(self) -> None:
        self._unused: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1000

    def give_back(self, mark: torch.cuda.Event) -> None:
        self._unused.append(mark)
