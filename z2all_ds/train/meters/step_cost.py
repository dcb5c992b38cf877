"""Cost of a step: tokens per second, MFU and HFU, time by part, memory, time left; and its line on the terminal."""

import resource
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from z2all_ds.base.accounting import mfu, operations_per_token, peak_flops
from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.stages import RunStage
from z2all_ds.base.console import human_bytes, human_seconds

WINDOW_STEPS = 20
"""Number of steps over which rate and time left are averaged: smooth, but short enough to show a slowdown."""

CPU = torch.device("cpu")
DIGITS = {"tokens_per_second": 1, "mfu": 5, "mfu_exact": 5, "hfu": 5}
"""Decimal places in the records; seconds have six."""


@dataclass(frozen=True)
class StepCost:
    """Figures of one step, units in the names."""

    step_seconds: float
    """From the end of the previous step to the end of this one: the sum of all parts except communication."""
    data_wait_seconds: float
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    communication_seconds: float
    """Included in the three parts above (`communication.py`)."""
    checkpoint_seconds: float
    """Time of the checkpoint before this step."""
    validation_seconds: float
    """Time of the validation after this step, if any."""
    other_seconds: float
    """Records, profiler and other time between steps."""
    tokens_per_second: float
    """Averaged over the last steps, like the utilizations."""
    mfu: float | None
    """By the convention `origin` of `accounting.py`, as in published tables."""
    mfu_exact: float | None
    hfu: float | None
    """Like `mfu_exact`, including recomputation."""
    memory_bytes: int
    peak_memory_bytes: int
    reserved_memory_bytes: int
    """Peak memory that torch has reserved on the device, including fragmentation."""
    host_memory_bytes: int
    """Peak resident memory of this process, including pinned memory."""
    remaining_seconds: float

    def as_record(self) -> dict[str, Any]:
        """Return the figures for metrics.jsonl; the time left is shown only on the terminal."""
        figures = asdict(self)
        del figures["remaining_seconds"]
        return {
            name: round(value, DIGITS.get(name, 6)) if isinstance(value, float) else value
            for name, value in figures.items()
        }


class Meters:
    """Measures from step to step; each stage has its own tokens and FLOPs."""

    def __init__(
        self, run: RunConfig, world_size: int, device: torch.device, first_step: int, cross_entropy: str = ""
    ) -> None:
        """`cross_entropy` is the backend in use: some compute the logits twice."""
        self._run, self._device, self._cross_entropy = run, device, cross_entropy
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._peak_of_all_ranks = peak * world_size if peak else None
        self._step = first_step
        self._times = deque([time.monotonic()], maxlen=WINDOW_STEPS + 1)
        self._stage: RunStage | None = None
        self._flops_per_token: dict[str, int] = {}

    def begin_stage(self, stage: RunStage) -> None:
        """Restart the rates; no time is lost between the last step of one stage and the first of the next."""
        shape, length, train = self._run.model.shape, stage.sequence_length, self._run.train
        self._flops_per_token = operations_per_token(
            shape, length, train.activation_checkpointing, train.recompute, self._cross_entropy
        )
        self._stage = stage
        self._times = deque([self._times[-1]], maxlen=WINDOW_STEPS + 1)

    def measure(
        self,
        parts: dict[str, float],
        communication_seconds: float = 0.0,
        checkpoint_seconds: float = 0.0,
        validation_seconds: float = 0.0,
        graph_bytes: int = 0,
    ) -> StepCost:
        """Return the cost of a step; call at its end with the seconds of its parts (`TimeSplit.take`). `graph_bytes` is
        the memory of CUDA graphs, which torch counts separately."""
        assert self._stage is not None, "call begin_stage first"
        self._step += 1
        self._times.append(time.monotonic())
        step_seconds = self._times[-1] - self._times[-2]
        seconds_per_step = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        tokens_per_second = self._stage.tokens_per_step / seconds_per_step
        memory_now = memory_bytes(self._device)
        return StepCost(
            step_seconds=step_seconds,
            data_wait_seconds=parts["data_wait"],
            forward_seconds=parts["forward"],
            backward_seconds=parts["backward"],
            optimizer_seconds=parts["optimizer"],
            communication_seconds=communication_seconds,
            checkpoint_seconds=checkpoint_seconds,
            validation_seconds=validation_seconds,
            # On a GPU the parts may include some time of the previous step (`time_split.py`).
            other_seconds=max(0.0, step_seconds - sum(parts.values()) - checkpoint_seconds - validation_seconds),
            tokens_per_second=tokens_per_second,
            mfu=self._utilisation(tokens_per_second, "origin"),
            mfu_exact=self._utilisation(tokens_per_second, "exact"),
            hfu=self._utilisation(tokens_per_second, "executed"),
            memory_bytes=memory_now + graph_bytes,
            # The kernel counts pages in two places, and the peak sometimes lags behind.
            peak_memory_bytes=max(memory_now, peak_memory_bytes(self._device)) + graph_bytes,
            reserved_memory_bytes=reserved_memory_bytes(self._device),
            host_memory_bytes=peak_memory_bytes(CPU),
            remaining_seconds=(self._run.train.steps - self._step) * seconds_per_step,
        )

    def _utilisation(self, tokens_per_second: float, convention: str) -> float | None:
        return mfu(tokens_per_second, self._flops_per_token[convention], self._peak_of_all_ranks)


def memory_bytes(device: torch.device) -> int:
    """Return the device memory allocated now; on a CPU the resident memory of this process, if /proc has it."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_memory_bytes(device)
    return resident_pages * resource.getpagesize()


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of allocated device memory; on a CPU the peak resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reserved_memory_bytes(device: torch.device) -> int:
    """Return the peak device memory reserved by torch; on a CPU the peak resident memory."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_memory_bytes(device)


def step_line(step: int, total_steps: int, loss: float, lr: float, grad_norm: float | None, cost: StepCost) -> str:
    """Return the terminal line of one step."""
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
