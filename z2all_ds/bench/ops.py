"""`z2all bench ops`: every backend of every op, forward and backward, at the model's shapes on random data.

On a GPU two figures are taken. `forward_ms` and `backward_ms` are the device's own time: it first sleeps until the host
has queued the calls, so that launching them costs nothing, as in a captured graph. `launched_ms` is what both
directions take together without that: for small ops mostly the host's time. Backward is both directions less forward.
A backend that cannot run has the reason instead of figures.
"""

import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata

import torch

from z2all_ds.base.config import RunConfig
from z2all_ds.base.console import human_bytes, progress
from z2all_ds.base.reports import Shown, Table
from z2all_ds.bench.op_cases import Inputs, OpCase, Shapes
from z2all_ds.bench.products import training_dtype
from z2all_ds.bench.shared import require_known
from z2all_ds.bench.timing import in_words, measured_on, require_memory, rotating, sets_needed, time_call
from z2all_ds.ops import Situation
from z2all_ds.ops.registry import OP_NAMES, Backend, backends_of, choose

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
TAKE_SINKS = ("triton", "chunked", "fp8", "torch")
"""Our own backends: the weight's gradient is also added to a sink, as training does it."""
LIBRARIES = ("triton", "liger-kernel", "flash-attn", "xformers", "torchao")
BLOCKS = 7
BLOCK_SECONDS = 2e-3
SLEEP_CYCLES_PER_SECOND = 3e9
"""More than a GPU's clock, so that a sleep is rather too long."""
LONGEST_SLEEP_SECONDS = 0.05
HOST_MARGIN = 1.5
REASON_CHARACTERS = 200
UNITS_PER_SECOND = {"GB/s": 1e9, "TFLOP/s": 1e12}


@dataclass(frozen=True)
class OpRow:
    """One backend on one case; without figures, but with the reason, where it did not run.

    `with_sink`: the weight's gradient is added to an fp32 sink. `auto`: it is what `auto` takes here. `launched_ms`:
    both directions, with the host in the way. `peak_extra_bytes`: most memory in use during both directions less what
    was there before, on a GPU only. Rates are of the work that the op cannot do without.
    """

    op: str
    case: str
    backend: str
    with_sink: bool
    auto: bool
    failed: str = ""
    forward_ms: float | None = None
    backward_ms: float | None = None
    launched_ms: float | None = None
    peak_extra_bytes: int | None = None
    rate_unit: str = ""
    forward_rate: float | None = None
    backward_rate: float | None = None


@dataclass(frozen=True)
class OpCosts:
    """All rows, with everything needed to measure them again."""

    measured_on: dict[str, str]
    dtype: str
    micro_batch: int
    sequence_length: int
    rows: list[OpRow]


def bench_ops(run: RunConfig, device: torch.device, ops: Sequence[str] = ()) -> OpCosts:
    """Measures the named ops, or all."""
    require_known("op", ops, OP_NAMES)
    dtype = training_dtype(device, run.train.precision)
    situation = Situation(device.type, DTYPE_NAMES[dtype], run.model.shape.head_dim)
    shapes = Shapes(run, device, dtype)
    cases = [case for op in OP_NAMES if op in (ops or OP_NAMES) for case in shapes.cases(op)]
    work = [variant for case in cases for variant in _variants(case, situation)]
    rows = []
    with progress("ops", len(work), "backends") as advance:
        for case, backend, with_sink in work:
            rows.append(measure_backend(case, backend, with_sink, situation, device))
            advance(1, f"{case.op} {backend.name}")
    facts = {**measured_on(device), **library_versions()}
    return OpCosts(facts, DTYPE_NAMES[dtype], run.train.micro_batch, run.train.sequence_length, rows)


def _variants(case: OpCase, situation: Situation) -> Iterator[tuple[OpCase, Backend, bool]]:
    for name, backend in backends_of(case.op).items():
        yield case, backend, False
        if case.has_weight and name in TAKE_SINKS and backend.why_not(situation) is None:
            yield case, backend, True


def measure_backend(
    case: OpCase, backend: Backend, with_sink: bool, situation: Situation, device: torch.device
) -> OpRow:
    """One row, whatever happens."""
    auto = choose(case.op, "auto", situation)[0].name == backend.name
    names = (case.op, case.name, backend.name, with_sink, auto)
    refusal = backend.why_not(situation)
    if refusal:
        return OpRow(*names, failed=refusal)
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns at length of kernels it did not take
            return _measured(names, case, backend.function, device)
    except Exception as error:  # vendors' kernels fail in every way there is; the other rows are worth having
        lines = str(error).strip().splitlines()
        return OpRow(*names, failed=": ".join([type(error).__name__, *lines[:1]])[:REASON_CHARACTERS])
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(
    names: tuple[str, str, str, bool, bool], case: OpCase, function: Callable[..., object], device: torch.device
) -> OpRow:
    num_sets = sets_needed(case.input_bytes, device)
    require_memory(2 * num_sets * case.input_bytes, device, f"{case.op} {case.name}".strip())
    sets = [case.make_inputs(names[3]) for _ in range(num_sets)]

    def both(inputs: Inputs) -> None:
        inputs.forward_and_backward(function)

    both(sets[0])  # compiles, and lets libraries make their workspaces, which are not the op's memory
    peak_extra_bytes = _peak_extra_bytes(lambda: both(sets[0]), device)
    forward_seconds, _ = time_queued(rotating(lambda inputs: inputs.forward(function), sets), device)
    both_seconds, launched_seconds = time_queued(rotating(both, sets), device)
    # On a noisy machine both can come out shorter than one.
    backward_seconds = max(0.0, both_seconds - forward_seconds)
    return OpRow(
        *names,
        forward_ms=1e3 * forward_seconds,
        backward_ms=1e3 * backward_seconds,
        launched_ms=1e3 * launched_seconds,
        peak_extra_bytes=peak_extra_bytes,
        rate_unit=case.unit,
        forward_rate=case.forward_work / forward_seconds / UNITS_PER_SECOND[case.unit],
        backward_rate=case.backward_work / backward_seconds / UNITS_PER_SECOND[case.unit] if backward_seconds else None,
    )


def _peak_extra_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def time_queued(function: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """(seconds of the device, seconds when launched as it goes) of one call; on a CPU both are the same."""
    launched = time_call(function, device)
    if device.type != "cuda":
        return launched, launched
    calls = math.ceil(BLOCK_SECONDS / launched)
    # Queueing takes no longer than the calls took as they went, whoever was the slower one.
    sleep = min(LONGEST_SLEEP_SECONDS, HOST_MARGIN * calls * launched)
    blocks = []
    with torch.cuda.device(device):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(BLOCKS):
            torch.cuda._sleep(int(SLEEP_CYCLES_PER_SECOND * sleep))
            first.record()
            for _ in range(calls):
                function()
            last.record()
            torch.cuda.synchronize()
            blocks.append(first.elapsed_time(last) / calls / 1e3)
    return statistics.median(blocks), launched


def library_versions() -> dict[str, str]:
    """Of the kernel libraries that are installed."""
    found = {}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def describe(costs: OpCosts) -> Shown:
    """Yields the device and a table of all rows. A star marks what `auto` takes."""
    yield in_words(costs.measured_on, costs.dtype, f"{costs.micro_batch} × {costs.sequence_length} tokens")
    figures = ("forward ms", "backward ms", "launched ms", "extra", "forward", "backward", "")
    yield Table(("op", "backend", *figures), map(_cells, costs.rows), "llrrrrrrl")


def _cells(row: OpRow) -> list[str]:
    name = f"{row.backend}{' with sink' if row.with_sink else ''}{' *' if row.auto else ''}"
    head = [f"{row.op} {row.case}".rstrip(), name]
    if row.failed:
        return [*head, row.failed]
    times = [f"{ms:.4f}" for ms in (row.forward_ms, row.backward_ms, row.launched_ms)]
    extra = "-" if row.peak_extra_bytes is None else human_bytes(row.peak_extra_bytes)
    rates = ["-" if rate is None else f"{rate:.3g}" for rate in (row.forward_rate, row.backward_rate)]
    return [*head, *times, extra, *rates, row.rate_unit]
