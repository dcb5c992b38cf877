"""The time of the parts of a step: by the clock on a CPU, by events on a GPU, without synchronizing."""

import time

import pytest
import torch

from tests.ops.comparing import on_gpu
from z2all_ds.train.meters.time_split import PARTS, TimeSplit

PAUSE_SECONDS = 0.002
LONG_CYCLES = 2_000_000_000
"""Cycles for the GPU to sleep: about a second at 2 GHz."""


def test_each_part_has_the_time_since_the_previous_mark() -> None:
    split = TimeSplit(torch.device("cpu"))
    began = time.perf_counter()
    split.begin()
    for _ in range(3):  # micro-batches: their parts are added up
        split.done("data_wait")
        time.sleep(2 * PAUSE_SECONDS)
        split.done("forward")
        time.sleep(PAUSE_SECONDS)
        split.done("backward")
        split.done("optimizer")
    seconds = split.take()
    passed = time.perf_counter() - began
    assert tuple(seconds) == PARTS
    assert seconds["forward"] >= 6 * PAUSE_SECONDS
    assert seconds["backward"] >= 3 * PAUSE_SECONDS
    assert min(seconds.values()) >= 0 and sum(seconds.values()) <= passed


def test_the_time_between_two_steps_belongs_to_neither() -> None:
    split = TimeSplit(torch.device("cpu"))
    split.begin()
    split.done("forward")
    split.take()
    time.sleep(5 * PAUSE_SECONDS)
    began = time.perf_counter()
    split.begin()
    split.done("backward")
    passed = time.perf_counter() - began
    seconds = split.take()
    assert 0 <= sum(seconds.values()) == seconds["backward"] <= passed
    assert set(split.take().values()) == {0.0}


def test_unknown_parts_and_marks_before_begin_fail_an_assertion() -> None:
    split = TimeSplit(torch.device("cpu"))
    with pytest.raises(AssertionError):
        split.done("forward")
    split.begin()
    with pytest.raises(AssertionError):
        split.done("communication")


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_on_a_gpu_a_part_lasts_as_long_as_its_kernels(device: str) -> None:
    split = TimeSplit(torch.device(device))
    torch.cuda.synchronize()
    split.begin()
    split.done("data_wait")
    torch.cuda._sleep(LONG_CYCLES // 10)
    split.done("forward")
    torch.cuda._sleep(LONG_CYCLES // 2)
    split.done("backward")
    split.done("optimizer")
    torch.cuda.synchronize()
    seconds = split.take()
    # The clock rate of the GPU may vary, so only rough ratios are compared.
    assert seconds["backward"] > 1.5 * seconds["forward"] > 0.01
    assert seconds["data_wait"] + seconds["optimizer"] < 0.5 * seconds["forward"]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_unfinished_gpu_work_is_not_waited_for_and_counts_in_the_next_step(device: str) -> None:
    split = TimeSplit(torch.device(device))
    torch.cuda.synchronize()
    split.begin()
    torch.cuda._sleep(LONG_CYCLES // 10)
    split.done("forward")
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    split.done("optimizer")
    first = split.take()
    assert first["forward"] > 0 and first["optimizer"] == 0
    torch.cuda.synchronize()
    split.begin()
    split.done("data_wait")
    torch.cuda.synchronize()
    second = split.take()
    assert second["optimizer"] > 2 * first["forward"] and second["forward"] == 0
    assert second["data_wait"] < first["forward"]
    assert set(split.take().values()) == {0.0}


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_data_wait_is_the_time_that_the_gpu_was_idle(device: str) -> None:
    """The host waits for a batch in both steps; in the second step the GPU is busy meanwhile."""
    split = TimeSplit(torch.device(device))
    waits = []
    for cycles in (0, LONG_CYCLES):
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        split.begin()
        time.sleep(0.05)
        split.done("data_wait")
        torch.cuda.synchronize()
        waits.append(split.take()["data_wait"])
    assert waits[0] >= 0.04 and waits[1] < 0.01


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_a_replayed_cuda_graph_is_timed_like_single_kernels(device: str) -> None:
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        x = torch.randn(2048, 2048, device=device)
        x @ x
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(50):
                y = x @ x
        split = TimeSplit(torch.device(device))
        split.begin()
        graph.replay()
        split.done("forward")
        split.done("backward")
        stream.synchronize()
        seconds = split.take()
    assert y.shape == x.shape
    assert seconds["forward"] > 10 * seconds["backward"]
