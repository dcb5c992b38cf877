"""`z2all plan --fit`: finds the largest micro-batch that trains on this machine's GPUs, and compares the planner's.

Each trial is a real run of a few steps in its own processes, so that one that runs out of memory affects no other. The
search starts at the planner's answer, moves up or down by doubling strides, and then bisects.
"""

from collections.abc import Callable
from typing import Any

from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.console import human_bytes, say
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.base.machine import gpu_count
from z2all_ds.base.reports import Shown
from z2all_ds.bench.gpu_memory import MemoryCase, measure
from z2all_ds.bench.shared import Report, scratch_folder
from z2all_ds.cluster.doctor.gpus import read_gpus
from z2all_ds.plan.memory import gpu_memory
from z2all_ds.train.fallback_data import prepare_data
from z2all_ds.zero.ds_config import resolve

MAX_ACCUMULATION = 2
"""Micro-batches per step of a trial: more than two need no more memory."""


def fit_here(config: str | None, overrides: list[str]) -> Report:
    """Search the largest micro-batch with one rank per GPU; `largest` is 0 if none fits."""
    ranks = gpu_count()
    if not ranks:
        rule = "tries micro-batches on a GPU, and none is visible"
        raise MachineError("--fit", rule, "Run it on a machine with a GPU.")
    run = load_run_config(config, overrides)
    if run.stages or run.train.batch_warmup_from:
        raise ConfigError("--fit", "tries one shape of micro-batch, and this run has stages", "Leave the stages out.")
    memory = _smallest_gpu_memory()
    predicted = predict(run, ranks, memory)
    trials: list[dict[str, Any]] = []
    with scratch_folder() as scratch:
        data = prepare_data(config, overrides, scratch / "data")

        def fits(size: int) -> bool:
            sizes = (f"train.{name}={value}" for name, value in _batch_sizes(run, ranks, size).items())
            case = MemoryCase("fit", (*overrides, *sizes), ranks, config)
            found = measure(case, data, scratch / f"run_{len(trials)}")
            if found.failed and not found.out_of_memory:
                fix = "Fix this first; `z2all train` shows the whole error."
                raise MachineError(f"--fit with a micro-batch of {size}", found.failed, fix)
            trials.append({"micro_batch": size, "fits": not found.failed, "measured": found})
            say(f"micro-batch {size} {'does not fit' if found.failed else 'trains'}")
            return not found.failed

        largest = largest_that(fits, first=max(1, predicted))
    return {
        "deepspeed": run.deepspeed,
        "ranks": ranks,
        "gpu_memory": memory,
        "largest": largest,
        "predicted": predicted,
        "trials": trials,
    }


def describe(fit: Report) -> Shown:
    """Yield one line."""
    peak = ""
    for trial in fit["trials"]:
        if trial["micro_batch"] == fit["largest"]:
            measured, predicted = trial["measured"].allocated, trial["measured"].predicted.allocated
            peak = f", peak {human_bytes(measured)} (predicted {human_bytes(predicted)})"
    yield (
        f"{fit['deepspeed']} on {fit['ranks']} GPU(s) of {human_bytes(fit['gpu_memory'])}: the largest micro-batch is"
        f" {fit['largest']}, after {len(fit['trials'])} trials{peak}; the planner predicted {fit['predicted']}"
    )


def predict(run: RunConfig, ranks: int, memory: int) -> int:
    """Return the largest micro-batch that fits according to the planner, 0 if none does."""

    def fits(size: int) -> bool:
        tried = run.model_copy(update={"train": run.train.model_copy(update=_batch_sizes(run, ranks, size))})
        return gpu_memory(tried, resolve(tried, ranks, "cuda"), ranks).total <= memory

    return largest_that(fits, first=run.train.micro_batch)


def _batch_sizes(run: RunConfig, ranks: int, size: int) -> dict[str, int]:
    """Return the settings of the train section for a micro-batch of `size`."""
    accumulation = min(MAX_ACCUMULATION, max(1, run.train.global_batch // (run.train.micro_batch * ranks)))
    return {"micro_batch": size, "global_batch": size * accumulation * ranks}


def _smallest_gpu_memory() -> int:
    try:
        return min(gpu.memory for gpu in read_gpus().gpus)
    except (ImportError, RuntimeError) as error:
        fix = "Run `pip install 'z2all_ds[gpu]'`, and see `z2all doctor`."
        raise MachineError("--fit", f"the GPU driver's library (NVML) does not answer ({error})", fix) from None


def largest_that(fits: Callable[[int], bool], first: int) -> int:
    """Return the largest size that fits, 0 if none does, with few calls. If a size fits, all smaller ones must fit."""
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
