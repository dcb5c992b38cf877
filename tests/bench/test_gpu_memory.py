"""`z2all bench memory`: its cases, one of which is measured on a GPU."""

import json

import pytest

from tests.ops.comparing import on_gpu
from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.base.machine import gpu_count
from z2all_ds.base.reports import to_json
from z2all_ds.bench.gpu_memory import (
    CASES,
    HEAD,
    OWN,
    MeasuredMemory,
    chosen_cases,
    content_of,
    measure_cases,
    to_line,
)
from z2all_ds.plan.memory import GpuMemory
from z2all_ds.zero.ds_config import resolve

PREDICTED = GpuMemory(weights=11 * 10**9)


def test_every_case_is_a_valid_run() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 12
    for case in CASES:
        resolved = resolve(load_run_config(case.config, list(case.overrides)), case.ranks, "cuda", elsewhere=True)
        assert resolved.config["train_micro_batch_size_per_gpu"] >= 1


def test_cases_are_chosen_by_name_or_from_a_config() -> None:
    assert chosen_cases([], None, [], 1) == list(CASES)
    assert [case.name for case in chosen_cases(["zero3", "zero1"], None, [], 1)] == ["zero3", "zero1"]
    (own,) = chosen_cases([], "z2all_tiny", ["train.micro_batch=4"], 2)
    assert (own.name, own.config, own.overrides, own.ranks) == (OWN, "z2all_tiny", ("train.micro_batch=4",), 2)
    with pytest.raises(ConfigError, match=r"case 'zero9': no such case\. Known: zero1, "):
        chosen_cases(["zero9"], None, [], 1)


def test_results_as_lines_and_as_json() -> None:
    found = MeasuredMemory("zero1", "z2all_1b", (), 1, PREDICTED, 10**10, 2 * 10**10, None, 10**9)
    assert found.error == pytest.approx(0.1)
    assert to_line(found).split() == ["zero1", "11.00", "10.00", "+10.0%", "20.00", "-", "1.00"]
    assert HEAD.split()[:7] == ["case", "predicted", "peak", "error", "reserved", "device", "host"]
    document = json.loads(to_json(content_of(found)))
    assert document["predicted"]["total"] == 11 * 10**9
    failed = MeasuredMemory("zero1", None, (), 1, PREDICTED, failed="torch.OutOfMemoryError: CUDA out of memory.")
    assert failed.out_of_memory and failed.error is None and "out of memory" in to_line(failed)
    assert not MeasuredMemory("zero1", None, (), 1, PREDICTED, failed="ConfigError: no such file").out_of_memory


@pytest.mark.skipif(gpu_count() > 0, reason="for machines without a GPU")
def test_measuring_without_a_gpu_is_refused() -> None:
    with pytest.raises(MachineError, match="none is visible"):
        next(measure_cases(CASES))


@on_gpu[0]
@on_gpu[1]
def test_the_peak_memory_of_a_real_run_is_close_to_the_prediction() -> None:
    (found,) = measure_cases(chosen_cases(["120m_zero2"], None, [], 1))
    assert not found.failed
    assert found.error is not None and abs(found.error) < 0.07
    assert found.allocated <= found.reserved
