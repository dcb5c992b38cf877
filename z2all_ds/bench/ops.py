"""`z2all bench ops`: times every backend of every op, forward and backward, at the model's shapes on random data.

On a GPU the figures are the device's own time: it first sleeps until the host has queued the calls, so that launches
cost nothing, as in a captured graph. Backward is both directions minus forward. A backend that cannot run has the
reason instead of figures.
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
from z2all_ds.bench.op_cases import Inputs, ModelCases, OpCase
from z2all_ds.bench.products import training_dtype
from z2all_ds.bench.shared import Report, require_known
from z2all_ds.bench.timing import head_line, measured_on, require_memory, rotating, sets_needed, time_call
from z2all_ds.ops import Situation
from z2all_ds.ops.registry import OP_NAMES, Backend, backends_of, choose

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
BACKENDS_WITH_SINK = ("triton", "chunked", "fp8", "torch")
"""Our own backends: they are also measured with the weight's gradient added to a sink, as in training."""
LIBRARIES = ("triton", "liger-kernel", "flash-attn", "xformers", "torchao")
BLOCKS = 7
BLOCK_SECONDS = 2e-3
SLEEP_CYCLES_PER_SECOND = 3e9
"""More than a GPU's clock rate, so that a sleep is too long rather than too short."""
LONGEST_SLEEP_SECONDS = 0.05
HOST_MARGIN = 1.5
REASON_CHARACTERS = 200


@dataclass(frozen=True)
class OpRow:
    """One backend on one case; it has the reason instead of figures if it did not run.

    `with_sink`: the weight's gradient is added to an fp32 sink. `auto`: `auto` chooses this backend here.
    `peak_extra_bytes`: peak memory during both directions minus the memory before, on a GPU only.
    """

    op: str
    case: str
    backend: str
    with_sink: bool
    auto: bool
    failed: str = ""
    forward_ms: float | None = None
    backward_ms: float | None = None
    peak_extra_bytes: int | None = None


def bench_ops(run: RunConfig, device: torch.device, ops: Sequence[str] = ()) -> Report:
    """Measure the named ops, or all."""
    require_known("op", ops, OP_NAMES)
    dtype = training_dtype(device, run.train.precision)
    situation = Situation(device.type, DTYPE_NAMES[dtype], run.model.shape.head_dim)
    model = ModelCases(run, device, dtype)
    cases = [case for op in OP_NAMES if op in (ops or OP_NAMES) for case in model.cases(op)]
    work = [variant for case in cases for variant in _variants(case, situation)]
    rows = []
    with progress("ops", len(work), "backends") as advance:
        for case, backend, with_sink in work:
            rows.append(measure_backend(case, backend, with_sink, situation, device))
            advance(1, f"{case.op} {backend.name}")
    return {
        "measured_on": {**measured_on(device), **library_versions()},
        "dtype": DTYPE_NAMES[dtype],
        "micro_batch": run.train.micro_batch,
        "sequence_length": run.train.sequence_length,
        "rows": rows,
    }


def _variants(case: OpCase, situation: Situation) -> Iterator[tuple[OpCase, Backend, bool]]:
    for name, backend in backends_of(case.op).items():
        yield case, backend, False
        if case.has_weight and name in BACKENDS_WITH_SINK and backend.why_not(situation) is None:
            yield case, backend, True


def measure_backend(
    case: OpCase, backend: Backend, with_sink: bool, situation: Situation, device: torch.device
) -> OpRow:
    """Return one row, also if the backend fails."""
    auto = choose(case.op, "auto", situation)[0].name == backend.name
    names = (case.op, case.name, backend.name, with_sink, auto)
    refusal = backend.why_not(situation)
    if refusal:
        return OpRow(*names, failed=refusal)
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns at length about kernels that it did not take
            return OpRow(*names, "", *_measure(case, backend.function, with_sink, device))
    except Exception as error:  # vendors' kernels fail in many ways; the other rows are still measured
        lines = str(error).strip().splitlines()
        return OpRow(*names, failed=": ".join([type(error).__name__, *lines[:1]])[:REASON_CHARACTERS])
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(
    case: OpCase, function: Callable[..., object], with_sink: bool, device: torch.device
) -> tuple[float, float, int | None]:
    """Return the milliseconds forward and backward, and the peak memory in bytes."""
    num_sets = sets_needed(case.input_bytes, device)
    require_memory(2 * num_sets * case.input_bytes, device, f"{case.op} {case.name}".strip())
    sets = [case.make_inputs(with_sink) for _ in range(num_sets)]

    def both(inputs: Inputs) -> None:
        inputs.forward_and_backward(function)

    both(sets[0])  # compiles, and lets libraries allocate their workspaces, which are not the op's memory
    peak_extra_bytes = _peak_extra_bytes(lambda: both(sets[0]), device)
    forward_seconds = time_queued(rotating(lambda inputs: inputs.forward(function), sets), device)
    both_seconds = time_queued(rotating(both, sets), device)
    # On a noisy machine both directions can take less time than one.
    return 1e3 * forward_seconds, 1e3 * max(0.0, both_seconds - forward_seconds), peak_extra_bytes


def _peak_extra_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def time_queued(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that the device takes for one call, without the host's time for launches."""
    launched = time_call(function, device)
    if device.type != "cuda":
        return launched
    calls = math.ceil(BLOCK_SECONDS / launched)
    # Queueing the calls takes no longer than the calls took with their launches.
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
    return statistics.median(blocks)


def library_versions() -> dict[str, str]:
    """Return the versions of the installed kernel libraries."""
    found = {}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def describe(report: Report) -> Shown:
    """Yield the device and a table of all rows. A star marks the choice of `auto`."""
    size = f"{report['micro_batch']} × {report['sequence_length']} tokens"
    yield head_line(report["measured_on"], report["dtype"], size)
    yield Table(("op", "backend", "forward ms", "backward ms", "extra memory"), map(_cells, report["rows"]), "llr")


def _cells(row: OpRow) -> list[str]:
    name = f"{row.backend}{' with sink' if row.with_sink else ''}{' *' if row.auto else ''}"
    head = [f"{row.op} {row.case}".rstrip(), name]
    if row.failed:
        return [*head, row.failed]
    extra = "-" if row.peak_extra_bytes is None else human_bytes(row.peak_extra_bytes)
    return [*head, f"{row.forward_ms:.4f}", f"{row.backward_ms:.4f}", extra]
