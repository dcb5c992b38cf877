"""`z2all plan --fit`: the largest micro-batch that trains on this machine's GPUs, by trial, and the planner's.

Every trial is a real run of a few steps in processes of its own, so that one that runs out of memory spoils nothing.
The first is the planner's answer; from there it goes up or down by doubled strides, and then by halves.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.console import human_bytes, say
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.base.machine import gpu_count
from z2all_ds.bench.gpu_memory import MeasuredMemory, MemoryCase, measure
from z2all_ds.bench.shared import scratch_folder
from z2all_ds.cluster.doctor.gpus import read_gpus
from z2all_ds.plan.memory import gpu_memory
from z2all_ds.train.fallback_data import prepare_data
from z2all_ds.zero.ds_config import resolve

MOST_ACCUMULATED = 2
"""Micro-batches of a trial's step: more need no more memory than two."""


@dataclass(frozen=True)
class Trial:
    """One micro-batch that was tried."""

    micro_batch: int
    fits: bool
    measured: MeasuredMemory


@dataclass(frozen=True)
class Fit:
    """What trials and the planner say."""

    deepspeed: str
    ranks: int
    gpu_memory: int
    largest: int
    """0 where not even one sample fits."""
    predicted: int
    trials: tuple[Trial, ...]

    @property
    def told(self) -> str:
        best = next((trial.measured for trial in self.trials if trial.micro_batch == self.largest), None)
        guess = best.predicted.allocated if best and best.predicted else 0
        peak = f", peak {human_bytes(best.allocated)} (predicted {human_bytes(guess)})" if best else ""
        return (
            f"{self.deepspeed} on {self.ranks} GPU(s) of {human_bytes(self.gpu_memory)}: micro-batches of up to"
            f" {self.largest} train, after {len(self.trials)} trials{peak}; the planner said {self.predicted}"
        )


def fit_here(config: str | None, overrides: list[str]) -> Fit:
    """One rank on each GPU."""
    ranks = gpu_count()
    if not ranks:
        raise MachineError(
            "--fit", "tries micro-batches on a GPU, and none is visible", "Run it on a machine with one."
        )
    run = load_run_config(config, overrides)
    if run.stages or run.train.batch_warmup_from:
        raise ConfigError("--fit", "tries one shape of micro-batch, and this run has stages", "Leave the stages out.")
    memory = _memory_here()
    predicted = predict(run, ranks, memory)
    trials: list[Trial] = []
    with scratch_folder() as scratch:
        data = prepare_data(config, overrides, scratch / "data")

        def fits(size: int) -> bool:
            sizes = (f"train.{name}={value}" for name, value in _sizes(run, ranks, size).items())
            case = MemoryCase("fit", (*overrides, *sizes), ranks, config)
            found = measure(case, data, scratch / f"run_{len(trials)}")
            if found.failed and not found.out_of_memory:
                fix = "Put that right first; `z2all train` shows all of it."
                raise MachineError(f"--fit with micro-batches of {size}", found.failed, fix)
            trials.append(Trial(size, not found.failed, found))
            say(f"micro-batches of {size} {'do not fit' if found.failed else 'train'}")
            return not found.failed

        largest = largest_that(fits, first=max(1, predicted))
    return Fit(run.deepspeed, ranks, memory, largest, predicted, tuple(trials))


def predict(run: RunConfig, ranks: int, memory: int) -> int:
    """The largest micro-batch that the planner lets in; 0 if none."""

    def fits(size: int) -> bool:
        tried = run.model_copy(update={"train": run.train.model_copy(update=_sizes(run, ranks, size))})
        return gpu_memory(tried, resolve(tried, ranks, "cuda"), ranks).total <= memory

    return largest_that(fits, first=run.train.micro_batch)


def _sizes(run: RunConfig, ranks: int, size: int) -> dict[str, int]:
    """Of the train section, for micro-batches of `size`."""
    accumulated = min(MOST_ACCUMULATED, max(1, run.train.global_batch // (run.train.micro_batch * ranks)))
    return {"micro_batch": size, "global_batch": size * accumulated * ranks}


def _memory_here() -> int:
    """Of the smallest GPU."""
    try:
        return min(gpu.memory for gpu in read_gpus().gpus)
    except (ImportError, RuntimeError) as error:
        fix = "Run `pip install 'z2all_ds[gpu]'`, and see `z2all doctor`."
        raise MachineError("--fit", f"asks the GPU driver's library, which does not answer ({error})", fix) from None


def largest_that(fits: Callable[[int], bool], first: int) -> int:
    """The largest size from 1 on that fits, where all smaller ones do, too; 0 if none. Asks about few."""
    if fits(first):
        low, stride = first, 1
        while fits(low + stride):
            low, stride = low + stride, 2 * stride
        high = low + stride
    else:
        high, stride = first, 1
        while high - stride > 0 and not fits(high - stride):
            high, stride = high - stride, 2 * stride
        low = max(0, high - stride)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def content_of(found: Fit) -> dict[str, object]:
    """Returns the result for JSON, with its sentence."""
    return {**asdict(found), "told": found.told}
