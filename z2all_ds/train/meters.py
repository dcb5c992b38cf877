"""What a step cost: tokens per second, MFU, memory, time left; and the one line that says so on the terminal."""

import resource
import time
from collections import deque
from dataclasses import dataclass

import torch

from z2all_ds.accounting import flops_per_token, peak_flops
from z2all_ds.config import RunConfig
from z2all_ds.console import human_bytes, human_seconds
from z2all_ds.run_stages import RunStage

WINDOW_STEPS = 20
"""Steps the rate and the time left are averaged over: long enough to be calm, short enough to show a slowdown."""


@dataclass(frozen=True)
class StepCost:
    """Figures of one step, units in the names."""

    step_seconds: float
    tokens_per_second: float
    mfu: float | None
    peak_memory_bytes: int
    remaining_seconds: float


class Meters:
    """Measures from step to step, within one stage."""

    def __init__(self, run: RunConfig, stage: RunStage, world_size: int, device: torch.device, first_step: int) -> None:
        self._tokens_per_step = stage.tokens_per_step
        self._flops_per_token = flops_per_token(run.model.shape, stage.sequence_length, "origin")
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._peak_of_all_ranks = peak * world_size if peak else None
        self._device = device
        self._last_step = run.train.steps
        self._step = first_step
        self._times = deque([time.monotonic()], maxlen=WINDOW_STEPS + 1)

    def measure(self, graph_bytes: int = 0) -> StepCost:
        """Call once at the end of each step; `graph_bytes` is the memory of CUDA graphs, which torch counts apart."""
        self._step += 1
        self._times.append(time.monotonic())
        seconds_per_step = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        tokens_per_second = self._tokens_per_step / seconds_per_step
        mfu = tokens_per_second * self._flops_per_token / self._peak_of_all_ranks if self._peak_of_all_ranks else None
        return StepCost(
            step_seconds=self._times[-1] - self._times[-2],
            tokens_per_second=tokens_per_second,
            mfu=mfu,
            peak_memory_bytes=peak_memory_bytes(self._device) + graph_bytes,
            remaining_seconds=(self._last_step - self._step) * seconds_per_step,
        )


def peak_memory_bytes(device: torch.device) -> int:
    """Most device memory allocated so far; on a CPU the most this process has had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def step_line(step: int, total_steps: int, loss: float, lr: float, grad_norm: float | None, cost: StepCost) -> str:
    """The line of one step on the terminal."""
    parts = [
        f"step {step}/{total_steps}",
        f"{100 * step / total_steps:.0f}%",
        f"loss {loss:.4f}",
        f"lr {lr:.2e}",
        f"grad {grad_norm:.3f}" if grad_norm is not None else "grad -",
        f"{cost.tokens_per_second:,.0f} tok/s",
        f"MFU {100 * cost.mfu:.1f}%" if cost.mfu is not None else "MFU -",
        f"mem {human_bytes(cost.peak_memory_bytes)}",
        f"ETA {human_seconds(cost.remaining_seconds)}",
    ]
    return " | ".join(parts)
