"""`z2all bench memory`: the peak GPU memory of short real runs, compared with the planner's prediction.

The cases cover every rule of the planner: DeepSpeed JSONs, shapes of micro-batches, activation checkpointing, backends
of ops, optimizers, two ranks. The user's own run is measured in the same way.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from z2all_ds.base.config import anchored, load_run_config
from z2all_ds.base.console import heartbeat
from z2all_ds.base.errors import MachineError
from z2all_ds.base.machine import gpu_count
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.bench.shared import error_line, require_known, scratch_folder
from z2all_ds.bench.shared_gpu import shared_gpu_command
from z2all_ds.plan.memory import GpuMemory, gpu_memory
from z2all_ds.track.writer import read_records
from z2all_ds.train.fallback_data import prepare_data
from z2all_ds.train.processes.local_ranks import LocalCommand, local_command, rank_arguments, run_local_ranks
from z2all_ds.zero.ds_config import resolve
from z2all_ds.zero.op_builds import needed_ops, prebuild

STEPS = 3
"""The first step creates the optimizer states and captures the graphs; the second is like all others."""
SAMPLE_EVERY_SECONDS = 0.1
OWN = "own"


@dataclass(frozen=True)
class MemoryCase:
    """A run to measure."""

    name: str
    overrides: tuple[str, ...]
    ranks: int = 1
    config: str | None = "z2all_1b"


def _case(name: str, *overrides: str, micro: int = 8, accumulation: int = 2, ranks: int = 1) -> MemoryCase:
    batch = (f"train.micro_batch={micro}", f"train.global_batch={micro * accumulation * ranks}")
    return MemoryCase(name, (*batch, *overrides), ranks)


REFERENCE_OPS = tuple(f"ops.{op}=torch" for op in ("rope", "rms_norm", "swiglu", "linear", "cross_entropy"))
ONE_DOCUMENT = "data.document_mask=false"
OF_3B = (
    *("model.hidden_size=4096", "model.intermediate_size=11008", "model.num_hidden_layers=12"),
    *("model.num_attention_heads=32", "model.num_key_value_heads=32"),
)
"""12 layers of the 7B model: 3.0 B parameters."""
LONG = ("train.sequence_length=8192", "model.max_position_embeddings=8192")
FEW_ACTIVATIONS = ("train.sequence_length=256", "train.activation_checkpointing=full")
"""So that the peak is in the optimizer step."""
CASES = (
    _case("zero1", "deepspeed=zero1", ONE_DOCUMENT),
    _case("zero1_micro_2", "deepspeed=zero1", ONE_DOCUMENT, micro=2),
    _case("zero1_micro_24", "deepspeed=zero1", ONE_DOCUMENT, micro=24),
    _case("zero1_documents", "deepspeed=zero1"),
    _case("zero1_documents_micro_2", "deepspeed=zero1", micro=2, accumulation=4),
    _case("zero1_no_graphs", "deepspeed=zero1", "train.cuda_graphs=never"),
    _case("zero1_one_micro_batch", "deepspeed=zero1", accumulation=1),
    _case("zero1_fp16", "deepspeed=zero1_fp16"),
    _case("zero0_fp32", "deepspeed=zero0", micro=4),
    _case("zero0_fp32_one_document", "deepspeed=zero0", ONE_DOCUMENT, micro=4),
    _case("zero2", "deepspeed=zero2"),
    _case("zero2_micro_2", "deepspeed=zero2", micro=2),
    _case("zero3", "deepspeed=zero3"),
    _case("zero2_offload", "deepspeed=zero2_offload"),
    _case("zero3_offload", "deepspeed=zero3_offload"),
    _case("zero3_offload_param", "deepspeed=zero3_offload_param"),
    _case("full_checkpointing", "deepspeed=zero1", "train.activation_checkpointing=full"),
    _case("full_checkpointing_8192", "deepspeed=zero2", "train.activation_checkpointing=full", *LONG, micro=4),
    _case("selective_mlp", "deepspeed=zero1", "train.activation_checkpointing=selective"),
    _case("chunked_loss", "deepspeed=zero1", "ops.cross_entropy=chunked", ONE_DOCUMENT),
    _case("fp8", "deepspeed=zero1", "ops.linear=fp8", ONE_DOCUMENT),
    _case("reference_ops", "deepspeed=zero1", *REFERENCE_OPS, ONE_DOCUMENT, micro=4),
    _case("eager_attention", "deepspeed=zero2", "ops.attention=eager", micro=2),
    _case("fp32_stream", "deepspeed=zero2", "model.residual_in_fp32=true"),
    _case("compiled_layers", "deepspeed=zero2", "train.compile=layers"),
    _case("adamw_8bit", "deepspeed=zero2", "optimizer.kind=adamw_8bit"),
    _case("adamw_8bit_step_zero1", "deepspeed=zero1", "optimizer.kind=adamw_8bit", *FEW_ACTIVATIONS, micro=1),
    _case("adamw_8bit_step_zero2", "deepspeed=zero2", "optimizer.kind=adamw_8bit", *FEW_ACTIVATIONS, micro=1),
    _case("adamw_8bit_step_zero3", "deepspeed=zero3", "optimizer.kind=adamw_8bit", *FEW_ACTIVATIONS, micro=1),
    _case("adafactor_step_zero2", "deepspeed=zero2", "optimizer.kind=adafactor", *FEW_ACTIVATIONS, micro=1),
    _case("3b_zero1", "deepspeed=zero1", *OF_3B, micro=4),
    MemoryCase("120m_zero2", ("deepspeed=zero2", "train.micro_batch=32", "train.global_batch=64"), config="z2all_120m"),
    _case("two_ranks_zero1", "deepspeed=zero1", micro=4, ranks=2),
    _case("two_ranks_zero2", "deepspeed=zero2", micro=4, ranks=2),
    _case("two_ranks_zero2_offload", "deepspeed=zero2_offload", micro=4, ranks=2),
    _case("two_ranks_zero3", "deepspeed=zero3", micro=4, ranks=2),
    _case("two_ranks_zero3_hpz", "deepspeed=zero3_hpz", micro=4, ranks=2),
    _case("two_ranks_3b_zero3", "deepspeed=zero3", *OF_3B, micro=2, ranks=2),
)


@dataclass(frozen=True)
class MeasuredMemory:
    """Peaks of rank 0 in bytes: allocated and reserved by torch, and resident in host memory.

    `device`: growth of the memory in use on the whole GPU, by all its ranks and by CUDA itself; None without NVML.
    """

    name: str
    config: str | None
    overrides: tuple[str, ...]
    ranks: int
    predicted: GpuMemory
    allocated: int = 0
    reserved: int = 0
    device: int | None = None
    host: int = 0
    failed: str = ""

    @property
    def out_of_memory(self) -> bool:
        """True after torch's error, or that of the dry run before the first step."""
        return "OutOfMemoryError" in self.failed or "need more than this GPU" in self.failed

    @property
    def error(self) -> float | None:
        """Error of the prediction, as a share of the measured peak."""
        return self.predicted.allocated / self.allocated - 1 if self.allocated else None


def chosen_cases(names: Sequence[str], config: str | None, overrides: list[str], ranks: int) -> list[MemoryCase]:
    """Return the named cases; without names the user's own run if one is given, else all cases."""
    known = {case.name: case for case in CASES}
    require_known("case", names, list(known))
    if names or not (config or overrides):
        return [known[name] for name in names or known]
    return [MemoryCase(OWN, tuple(overrides), ranks, config)]


def measure_cases(cases: Sequence[MemoryCase]) -> Iterator[MeasuredMemory]:
    """Yield each result as soon as it is measured. All cases read the same data."""
    if not gpu_count():
        raise MachineError("z2all bench memory", "needs a GPU, and none is visible", "Run it on a machine with a GPU.")
    with scratch_folder() as scratch:
        data = prepare_data(cases[0].config, list(cases[0].overrides), scratch / "data")
        for number, case in enumerate(cases):
            with heartbeat(case.name):
                yield measure(case, data, scratch / f"run_{number}")


def measure(case: MemoryCase, data: list[str], run_dir: Path) -> MeasuredMemory:
    """Run one case. The result of a failed run has the reason; only an invalid config raises an error."""
    chosen = [f"run_dir={run_dir}", f"train.steps={STEPS}", "schedule.warmup_steps=1", "checkpoint.at_end=false"]
    overrides = [*case.overrides, *data, *chosen]
    run = load_run_config(case.config, overrides)
    resolved = resolve(run, case.ranks, "cuda")
    predicted = gpu_memory(run, resolved, case.ranks)
    prebuild(needed_ops(resolved, "cuda"))
    command: LocalCommand = local_command if case.ranks <= gpu_count() else shared_gpu_command
    log = run_dir / "logs" / "launcher.log"
    with device_peak() as device:
        code = run_local_ranks(rank_arguments(anchored(run)), case.ranks, log, command)
    facts = (case.name, case.config, case.overrides, case.ranks, predicted)
    records = list(read_records(RunFolder(run_dir).metrics))
    if code or not records:
        output = (run_dir / "logs" / "rank_0000.log").read_text(encoding="utf-8", errors="replace")
        return MeasuredMemory(*facts, failed=error_line(output))
    return MeasuredMemory(
        *facts,
        allocated=max(record["peak_memory_bytes"] for record in records),
        reserved=max(record["reserved_memory_bytes"] for record in records),
        device=device.get("most"),
        host=max(record["host_memory_bytes"] for record in records),
    )


@contextmanager
def device_peak() -> Iterator[dict[str, int]]:
    """Yield a dict for the peak growth of the memory in use on the first GPU (`most`); it stays empty without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or the driver does not answer
        yield {}
        return
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    before = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    found, over = {"most": 0}, threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_EVERY_SECONDS):
            found["most"] = max(found["most"], pynvml.nvmlDeviceGetMemoryInfo(handle).used - before)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield found
    finally:
        over.set()
        sampler.join()
        pynvml.nvmlShutdown()


def content_of(result: MeasuredMemory) -> dict[str, object]:
    """Return one result for the JSON report, with the sums of the prediction and its error."""
    sums = {"allocated": result.predicted.allocated, "total": result.predicted.total}
    return {**asdict(result), "predicted": {**asdict(result.predicted), **sums}, "error": result.error}


HEAD = f"{'case':<26}{'predicted':>10}{'peak':>8}{'error':>8}{'reserved':>10}{'device':>9}{'host':>8}  (GB)"


def to_line(result: MeasuredMemory) -> str:
    """Return one line of the table."""
    if result.error is None:
        return f"{result.name:<26}  {result.failed}"
    device = "-" if result.device is None else f"{result.device / 1e9:.2f}"
    return (
        f"{result.name:<26}{result.predicted.allocated / 1e9:>10.2f}{result.allocated / 1e9:>8.2f}"
        f"{100 * result.error:>+7.1f}%{result.reserved / 1e9:>10.2f}{device:>9}{result.host / 1e9:>8.2f}"
    )
