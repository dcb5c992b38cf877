"""What a step cost: tokens per second, MFU and HFU, its time by parts, memory, time left; and the line that says so."""

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
"""Steps the rate and the time left are averaged over: long enough to be calm, short enough to show a slowdown."""

CPU = torch.device("cpu")
DIGITS = {"tokens_per_second": 1, "mfu": 5, "mfu_exact": 5, "hfu": 5}
"""Behind the point, in the records; seconds have six."""


@dataclass(frozen=True)
class StepCost:
    """Figures of one step, units in the names."""

    step_seconds: float
    """From the end of the step before to the end of this one: the sum of all parts but communication."""
    data_wait_seconds: float
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    communication_seconds: float
    """Inside the three before it (`communication.py`)."""
    checkpoint_seconds: float
    """Of the checkpoint before this step."""
    validation_seconds: float
    """Of the validation after it, where there is one."""
    other_seconds: float
    """Records, a profiler, what lies between steps."""
    tokens_per_second: float
    """Over the last steps, as the utilisations."""
    mfu: float | None
    """By the convention `origin` of `accounting.py`, as in published tables."""
    mfu_exact: float | None
    hfu: float | None
    """As `mfu_exact`, with what is computed a second time."""
    memory_bytes: int
    peak_memory_bytes: int
    reserved_memory_bytes: int
    """What torch has taken of the device so far: the peak, and the holes around it."""
    host_memory_bytes: int
    """Most that this process has had resident, pinned memory too."""
    remaining_seconds: float

    def as_record(self) -> dict[str, Any]:
        """For metrics.jsonl; the time left is for the person watching alone."""
        figures = asdict(self)
        del figures["remaining_seconds"]
        return {
            name: round(value, DIGITS.get(name, 6)) if isinstance(value, float) else value
            for name, value in figures.items()
        }


class Meters:
    """Measures from step to step; each stage has tokens and operations of its own."""

    def __init__(
        self, run: RunConfig, world_size: int, device: torch.device, first_step: int, cross_entropy: str = ""
    ) -> None:
        """`cross_entropy` is the backend in use: some make the logits twice."""
        self._run, self._device, self._cross_entropy = run, device, cross_entropy
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._peak_of_all_ranks = peak * world_size if peak else None
        self._step = first_step
        self._times = deque([time.monotonic()], maxlen=WINDOW_STEPS + 1)
        self._stage: RunStage | None = None
        self._flops_per_token: dict[str, int] = {}

    def begin_stage(self, stage: RunStage) -> None:
        """Rates begin anew; no time is lost between the last step of one stage and the first of the next."""
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
        """Call once at the end of each step, with the seconds of its parts (`TimeSplit.take`); `graph_bytes` is the
        memory of CUDA graphs, which torch counts apart."""
        assert self._stage is not None, "begin_stage comes first"
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
            # On a GPU the parts can be a moment of the step before too long (`time_split.py`).
            other_seconds=max(0.0, step_seconds - sum(parts.values()) - checkpoint_seconds - validation_seconds),
            tokens_per_second=tokens_per_second,
            mfu=self._utilisation(tokens_per_second, "origin"),
            mfu_exact=self._utilisation(tokens_per_second, "exact"),
            hfu=self._utilisation(tokens_per_second, "executed"),
            memory_bytes=memory_now + graph_bytes,
            # The kernel counts a process's pages in two places, and the peak is behind at times.
            peak_memory_bytes=max(memory_now, peak_memory_bytes(self._device)) + graph_bytes,
            reserved_memory_bytes=reserved_memory_bytes(self._device),
            host_memory_bytes=peak_memory_bytes(CPU),
            remaining_seconds=(self._run.train.steps - self._step) * seconds_per_step,
        )

    def _utilisation(self, tokens_per_second: float, convention: str) -> float | None:
        return mfu(tokens_per_second, self._flops_per_token[convention], self._peak_of_all_ranks)


def memory_bytes(device: torch.device) -> int:
    """Device memory allocated now; on a CPU what this process has resident, where /proc tells."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_memory_bytes(device)
    return resident_pages * resource.getpagesize()


def peak_memory_bytes(device: torch.device) -> int:
    """Most device memory allocated so far; on a CPU the most this process has had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reserved_memory_bytes(device: torch.device) -> int:
    """Of the device, by torch; a CPU's memory is not reserved."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_memory_bytes(device)


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
