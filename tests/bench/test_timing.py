"""Timing of calls, tested without exact times, since only the minimum duration of a sleep is certain."""

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from z2all_ds.base.accounting import peak_flops
from z2all_ds.base.errors import MachineError
from z2all_ds.bench.timing import (
    CACHE_SIZES,
    MAX_SETS,
    device_here,
    head_line,
    measure_in_passes,
    measured_on,
    require_memory,
    rotating,
    sets_needed,
    time_call,
)

CPU = torch.device("cpu")


def counted(function: Callable[[], object]) -> tuple[Callable[[], None], list[int]]:
    calls = [0]

    def call() -> None:
        calls[0] += 1
        function()

    return call, calls


def test_time_call_returns_the_seconds_of_one_call_for_any_budget() -> None:
    for budget_ms in (0.0, 20.0):
        function, calls = counted(lambda: time.sleep(0.002))
        started = time.perf_counter()
        seconds = time_call(function, CPU, budget_ms)
        passed = time.perf_counter() - started
        assert 0.002 <= seconds <= passed
        assert calls[0] >= 2  # the first call is not measured


def test_the_first_call_is_not_measured() -> None:
    waits = iter([0.05, 0.0])
    started = time.perf_counter()
    seconds = time_call(lambda: time.sleep(next(waits)), CPU, budget_ms=0.0)
    assert seconds <= time.perf_counter() - started - 0.05


def test_rotating_passes_the_inputs_in_turn() -> None:
    seen: list[str] = []
    call = rotating(seen.append, ["a", "b", "c"])
    for _ in range(5):
        call()
    assert seen == ["a", "b", "c", "a", "b"]


def test_cases_are_measured_in_turn_and_medians_are_returned() -> None:
    figures = {"a": iter([3.0, 1.0, 2.0]), "b": iter([5.0, 5.0, 4.0])}
    seen: list[str] = []

    def measure(name: str) -> dict[str, float]:
        seen.append(name)
        return {"seconds": next(figures[name])}

    cases = {name: partial(measure, name) for name in figures}
    assert measure_in_passes("test", cases, CPU, rounds=3) == {"a": {"seconds": 2.0}, "b": {"seconds": 5.0}}
    assert seen == ["a", "b"] * 3


def test_measured_on_names_the_device_and_its_libraries() -> None:
    facts = measured_on(CPU)
    assert "CPU" in facts["device"] and facts["torch"] == torch.__version__
    assert "cuda" not in facts
    assert head_line(facts, "fp32") == f"{facts['device']} | torch {torch.__version__} | fp32"


def test_ds_accelerator_selects_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert device_here() == CPU


def test_require_memory_refuses_more_than_the_free_memory() -> None:
    require_memory(1, CPU, "a byte")
    with pytest.raises(MachineError, match=r"free memory on cpu: the head needs 1,000,000\.0 GB"):
        require_memory(10**15, CPU, "the head")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
class TestOnGpu:
    device = torch.device("cuda", 0)

    def test_a_matrix_product_is_not_faster_than_the_peak_of_the_device(self) -> None:
        """Without waiting for the device, only the launch would be timed, which takes about 1 % of the time."""
        a, b = (torch.randn(4096, 4096, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        peak = peak_flops(torch.cuda.get_device_name(self.device)) or pytest.skip("no peak known for this GPU")
        assert time_call(lambda: a @ b, self.device) >= 2 * 4096**3 / peak

    def test_the_input_sets_together_exceed_the_cache(self) -> None:
        cache_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        assert sets_needed(10 * CACHE_SIZES * cache_bytes, self.device) == 1
        assert sets_needed(cache_bytes, self.device) == CACHE_SIZES
        assert sets_needed(1, self.device) == MAX_SETS

    def test_measured_on_names_the_gpu_and_its_libraries(self) -> None:
        facts = measured_on(self.device)
        assert facts["device"] == torch.cuda.get_device_name(self.device)
        assert facts["cuda"] == torch.version.cuda and int(facts["cudnn"]) > 8000
