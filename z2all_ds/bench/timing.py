"""Time of a call on a device: the median over repeats, on inputs that are not in a cache.

On a GPU the calls are queued and timed with events, in blocks of calls, so that the events add nothing measurable. The
host runs ahead of the device from the warm-up on. If the device finishes a call before the host can queue the next one
(about 10 microseconds), the measured time is that of the host.
"""

import itertools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from z2all_ds.base.console import progress
from z2all_ds.base.errors import MachineError
from z2all_ds.base.process_memory import available_bytes

BUDGET_MS = 30.0
WARMUP_MS = 10.0
BLOCK_MS = 2.0
MIN_BLOCKS = 5
ESTIMATE_CALLS = 3

CACHE_SIZES = 3
"""All input sets together are at least this many times as large as the L2 cache."""
MAX_SETS = 16
SETS_ON_CPU = 2

Inputs = TypeVar("Inputs")
Part = TypeVar("Part")


def device_here() -> torch.device:
    """Return the first GPU, or the CPU if there is none or if DS_ACCELERATOR=cpu."""
    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        return torch.device("cuda", 0)
    return torch.device("cpu")


def measured_on(device: torch.device) -> dict[str, str]:
    """Return the names and versions of the device and its libraries."""
    found = {"device": f"{platform.machine()} CPU, {torch.get_num_threads()} threads", "torch": torch.__version__}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def head_line(facts: dict[str, str], *more: str) -> str:
    """Return the line above a table: the result of `measured_on`, and more."""
    versions = (f"{name} {value}" for name, value in facts.items() if name != "device")
    return " | ".join([facts["device"], *versions, *more])


def measure_in_passes(
    label: str, cases: Mapping[str, Callable[[], dict[Part, float]]], device: torch.device, rounds: int
) -> dict[str, dict[Part, float]]:
    """Measure all cases `rounds` times and return the medians of the parts of each.

    Every pass measures all cases before any is repeated, because clocks drop under load. On a GPU one more pass comes
    first and is not counted: the GPU is cold and its libraries are not loaded.
    """
    uncounted = 1 if device.type == "cuda" else 0
    passes: list[dict[str, dict[Part, float]]] = []
    with progress(label, (uncounted + rounds) * len(cases), "cases") as advance:
        for _ in range(uncounted + rounds):
            passes.append({})
            for name, measure in cases.items():
                passes[-1][name] = measure()
                advance(1, name)
    return {
        name: {part: statistics.median(one[name][part] for one in passes[uncounted:]) for part in passes[0][name]}
        for name in cases
    }


def time_call(function: Callable[[], object], device: torch.device, budget_ms: float = BUDGET_MS) -> float:
    """Return the seconds of one call, the median of as many as fit in the budget. The first call is not measured."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _time_with_events(function, budget_ms)
    function()
    seconds: list[float] = []
    until = time.perf_counter() + budget_ms / 1e3
    while not seconds or time.perf_counter() < until:
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _time_with_events(function: Callable[[], object], budget_ms: float) -> float:
    function()  # the first call loads modules and picks algorithms
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(ESTIMATE_CALLS):
        function()
    last.record()
    torch.cuda.synchronize()
    # At least a microsecond: a clock that did not advance would ask for endless calls.
    call_ms = max(first.elapsed_time(last) / ESTIMATE_CALLS, 1e-3)
    calls = math.ceil(BLOCK_MS / call_ms)
    blocks = max(MIN_BLOCKS, math.ceil(budget_ms / (calls * call_ms)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(blocks + 1)]
    # No synchronization from here to the end: a block that starts on an idle device would include the launch.
    for _ in range(math.ceil(WARMUP_MS / call_ms)):
        function()
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(calls):
            function()
        mark.record()
    torch.cuda.synchronize()
    block_ms = statistics.median(before.elapsed_time(after) for before, after in itertools.pairwise(marks))
    return block_ms / calls / 1e3


def rotating(function: Callable[[Inputs], object], input_sets: Sequence[Inputs]) -> Callable[[], object]:
    """Return a function that calls `function` with the next input set each time."""
    turns = itertools.cycle(input_sets)
    return lambda: function(next(turns))


def sets_needed(bytes_per_call: int, device: torch.device) -> int:
    """Return the number of input sets of this size after which the first one is no longer in the L2 cache."""
    if device.type != "cuda":
        return SETS_ON_CPU
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_SETS, max(1, math.ceil(CACHE_SIZES * cache_bytes / bytes_per_call)))


def require_memory(bytes_needed: int, device: torch.device, what: str) -> None:
    """Raise MachineError before an allocation that cannot succeed."""
    bytes_free = available_bytes()
    if device.type == "cuda":
        held_for_reuse = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        bytes_free = int(torch.cuda.mem_get_info(device)[0]) + held_for_reuse
    if bytes_needed > bytes_free:
        raise MachineError(
            f"{bytes_free / 1e9:,.1f} GB of free memory on {device}",
            f"{what} needs {bytes_needed / 1e9:,.1f} GB",
            "Give smaller sizes or a smaller train.micro_batch.",
        )
