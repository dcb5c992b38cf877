"""The search for the largest micro-batch that fits, and its errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import MachineError
from z2all_ds.base.machine import gpu_count
from z2all_ds.bench import fit
from z2all_ds.bench.fit import describe, fit_here, largest_that, predict
from z2all_ds.bench.gpu_memory import MeasuredMemory
from z2all_ds.plan.memory import GpuMemory, gpu_memory
from z2all_ds.zero.ds_config import resolve


@given(st.integers(0, 3000), st.integers(1, 3000))
def test_the_largest_size_is_found_with_few_trials(largest: int, first: int) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= largest

    assert largest_that(fits, first) == largest
    assert min(asked) >= 1
    assert len(asked) == len(set(asked)) <= 2 + 2 * max(1, abs(largest - first)).bit_length()


def test_a_correct_first_guess_needs_two_trials() -> None:
    asked: list[int] = []
    assert largest_that(lambda size: asked.append(size) or size <= 47, 47) == 47  # type: ignore[func-returns-value]
    assert asked == [47, 48]


def test_predict_returns_the_largest_micro_batch_that_fits() -> None:
    run = load_run_config("z2all_1b", ["deepspeed=zero2"])
    memory = 80 * 10**9
    largest = predict(run, 1, memory)

    def total(size: int) -> int:
        tried = load_run_config(
            "z2all_1b", ["deepspeed=zero2", f"train.micro_batch={size}", f"train.global_batch={2 * size}"]
        )
        return gpu_memory(tried, resolve(tried, 1, "cuda"), 1).total

    assert total(largest) <= memory < total(largest + 1)
    assert predict(run, 1, 10**9) == 0


def test_describe_gives_one_line() -> None:
    measured = MeasuredMemory("fit", None, (), 1, GpuMemory(weights=2 * 2**30), allocated=2**30)
    trials = [{"micro_batch": 4, "fits": True, "measured": measured}]
    sizes = {"gpu_memory": 8 * 2**30, "largest": 4, "predicted": 5}
    assert list(describe({"deepspeed": "zero1", "ranks": 1, **sizes, "trials": trials})) == [
        "zero1 on 1 GPU(s) of 8.0 GiB: the largest micro-batch is 4, after 1 trials, peak 1.0 GiB (predicted 2.0 GiB);"
        " the planner predicted 5"
    ]


def test_a_driver_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "gpu_count", lambda: 1)

    def silent() -> None:
        raise RuntimeError("Driver Not Loaded")

    monkeypatch.setattr(fit, "read_gpus", silent)
    with pytest.raises(MachineError, match=r"does not answer \(Driver Not Loaded\)\. Run `pip install"):
        fit_here("z2all_1b", [])


@pytest.mark.skipif(gpu_count() > 0, reason="for machines without a GPU")
def test_fit_without_a_gpu_is_refused_with_one_line() -> None:
    with pytest.raises(MachineError, match="none is visible") as caught:
        fit_here("z2all_1b", [])
    assert "\n" not in str(caught.value)
