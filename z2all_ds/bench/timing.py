"""How long a call takes on a device: the median over repeats, on inputs that no cache holds.

On a GPU the work is queued and timed with events, in blocks of calls, so that the marks between them cost nothing that
shows; the host runs ahead of the device from the warm-up on. A call that the device ends sooner than the host can
queue the next one (some 10 microseconds) is measured as the host's time.
"""

import itertools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from z2all_ds.base.errors import MachineError
from z2all_ds.base.process_memory import available_bytes

BUDGET_MS = 30.0
WARMUP_MS = 10.0
BLOCK_MS = 2.0
MIN_BLOCKS = 5
ESTIMATE_CALLS = 3

CACHES_OVER = 3
"""Input sets together are at least so many times the L2 cache."""
MAX_SETS = 16
SETS_ON_CPU = 2

Inputs = TypeVar("Inputs")


def device_here() -> torch.device:
    """The first GPU, or the CPU; with a GPU visible, DS_ACCELERATOR=cpu still means the CPU."""
    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        return torch.device("cuda", 0)
    return torch.device("cpu")


def measured_on(device: torch.device) -> dict[str, str]:
    """Returns the device and the versions that a figure belongs to."""
    found = {"device": f"{platform.machine()} CPU, {torch.get_num_threads()} threads", "torch": torch.__version__}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def in_words(facts: dict[str, str], *more: str) -> str:
    """Returns what `measured_on` found, and more, as the line above a table."""
    versions = (f"{name} {value}" for name, value in facts.items() if name != "device")
    return " | ".join([facts["device"], *versions, *more])


def cold_passes(device: torch.device) -> int:
    """Returns how many passes not to count: the first one finds a GPU cold and its libraries unloaded."""
    return 1 if device.type == "cuda" else 0


def time_call(
    function: Callable[[], object], device: torch.device, budget_ms: float = BUDGET_MS, warmup_ms: float = WARMUP_MS
) -> float:
    """Seconds of one call, the median of as many as fit in the budget. `function` rotates its own inputs."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _time_with_events(function, budget_ms, warmup_ms)
    function()
    seconds: list[float] = []
    until = time.perf_counter() + budget_ms / 1e3
    while not seconds or time.perf_counter() < until:
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _time_with_events(function: Callable[[], object], budget_ms: float, warmup_ms: float) -> float:
    function()  # alone: the first call loads modules and picks algorithms
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(ESTIMATE_CALLS):
        function()
    last.record()
    torch.cuda.synchronize()
    # The floor of a microsecond keeps a clock that did not move from asking for endless calls.
    call_ms = max(first.elapsed_time(last) / ESTIMATE_CALLS, 1e-3)
    calls = math.ceil(BLOCK_MS / call_ms)
    blocks = max(MIN_BLOCKS, math.ceil(budget_ms / (calls * call_ms)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(blocks + 1)]
    # No synchronisation from here to the end: a block that began on an idle device would include the launch.
    for _ in range(math.ceil(warmup_ms / call_ms)):
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
    """A call on the next of the sets each time."""
    turns = itertools.cycle(input_sets)
    return lambda: function(next(turns))


def sets_needed(bytes_per_call: int, device: torch.device) -> int:
    """So many sets of tensors of this size that the first has left the L2 cache when its turn comes again."""
    if device.type != "cuda":
        return SETS_ON_CPU
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_SETS, max(1, math.ceil(CACHES_OVER * cache_bytes / bytes_per_call)))


def require_memory(bytes_needed: int, device: torch.device, what: str) -> None:
    """Fails with one line before an allocation that cannot succeed."""
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
