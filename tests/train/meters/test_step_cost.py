"""The cost of a step (time, rates, memory) and the line that reports it."""

import mmap
import time

import pytest
import torch

from tests.ops.comparing import on_gpu
from z2all_ds.base.accounting import flops_per_token, hardware_flops_per_token
from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.config.stages import run_stages
from z2all_ds.train.meters.step_cost import WINDOW_STEPS, Meters, StepCost, memory_bytes, peak_memory_bytes, step_line
from z2all_ds.train.meters.time_split import PARTS

CPU = torch.device("cpu")
PAUSE_SECONDS = 0.002
NO_TIME = dict.fromkeys(PARTS, 0.0)


def tiny_run(steps: int = 100, stages: str = "[]") -> RunConfig:
    batch = ("train.global_batch=8", "train.micro_batch=2")
    return load_run_config("z2all_tiny", [f"train.steps={steps}", *batch, f"stages={stages}"])


def meters_of(run: RunConfig, world_size: int, device: torch.device, first_step: int) -> Meters:
    meters = Meters(run, world_size, device, first_step, cross_entropy="chunked")
    (stage,) = run_stages(run)
    meters.begin_stage(stage)
    return meters


def cost_of(tokens_per_second: float, mfu: float | None, peak_memory_bytes: int, remaining_seconds: float) -> StepCost:
    parts = {f"{part}_seconds": 0.1 for part in PARTS}
    rates = {"tokens_per_second": tokens_per_second, "mfu": mfu, "mfu_exact": mfu, "hfu": mfu}
    return StepCost(
        step_seconds=0.5,
        **parts,
        communication_seconds=0.05,
        checkpoint_seconds=0.0,
        validation_seconds=0.0,
        other_seconds=0.1,
        **rates,  # type: ignore[arg-type]
        memory_bytes=peak_memory_bytes,
        peak_memory_bytes=peak_memory_bytes,
        reserved_memory_bytes=peak_memory_bytes,
        host_memory_bytes=peak_memory_bytes,
        remaining_seconds=remaining_seconds,
    )


def test_time_rate_and_forecast_of_one_step_are_consistent() -> None:
    run = tiny_run(steps=10)
    meters = meters_of(run, world_size=1, device=CPU, first_step=6)
    time.sleep(PAUSE_SECONDS)
    cost = meters.measure(NO_TIME)
    assert cost.step_seconds >= PAUSE_SECONDS
    tokens = run.train.global_batch * run.train.sequence_length
    assert cost.tokens_per_second * cost.step_seconds == pytest.approx(tokens, rel=1e-12)
    assert cost.remaining_seconds == pytest.approx(3 * cost.step_seconds, rel=1e-12)  # steps 8, 9 and 10
    assert cost.mfu is cost.mfu_exact is cost.hfu is None  # the peak throughput of a CPU is unknown


def test_the_remaining_time_is_zero_after_the_last_step() -> None:
    run = tiny_run(steps=2)
    meters = meters_of(run, world_size=1, device=CPU, first_step=0)
    costs = []
    for _ in range(2):
        time.sleep(PAUSE_SECONDS)
        costs.append(meters.measure(NO_TIME))
    assert costs[0].remaining_seconds > 0
    assert costs[1].remaining_seconds == 0


def test_the_rate_is_a_mean_over_the_window_only() -> None:
    run = tiny_run()
    meters = meters_of(run, world_size=1, device=CPU, first_step=0)
    costs = []
    for _ in range(WINDOW_STEPS + 3):
        time.sleep(PAUSE_SECONDS)
        costs.append(meters.measure(NO_TIME))
    tokens = run.train.global_batch * run.train.sequence_length
    window = sum(cost.step_seconds for cost in costs[-WINDOW_STEPS:])
    assert costs[-1].tokens_per_second == pytest.approx(tokens * WINDOW_STEPS / window, rel=1e-9)


def test_tokens_are_those_of_the_stage_and_remaining_time_is_that_of_the_run() -> None:
    run = tiny_run(steps=10, stages="[{name: a, steps: 4}, {name: b, global_batch: 4, sequence_length: 16}]")
    meters = Meters(run, world_size=1, device=CPU, first_step=4)
    meters.begin_stage(run_stages(run)[1])
    time.sleep(PAUSE_SECONDS)
    cost = meters.measure(NO_TIME)
    assert cost.tokens_per_second * cost.step_seconds == pytest.approx(4 * 16, rel=1e-12)
    assert cost.remaining_seconds == pytest.approx(5 * cost.step_seconds, rel=1e-12)


def test_time_between_two_stages_is_counted_and_rates_start_over() -> None:
    run = tiny_run(steps=10, stages="[{name: a, steps: 4}, {name: b, global_batch: 4, sequence_length: 16}]")
    first, second = run_stages(run)
    meters = Meters(run, world_size=1, device=CPU, first_step=3)
    meters.begin_stage(first)
    time.sleep(PAUSE_SECONDS)
    meters.measure(NO_TIME)
    time.sleep(PAUSE_SECONDS)  # for example a checkpoint
    meters.begin_stage(second)
    cost = meters.measure(NO_TIME, checkpoint_seconds=PAUSE_SECONDS)
    assert cost.step_seconds >= cost.checkpoint_seconds == PAUSE_SECONDS
    assert cost.tokens_per_second * cost.step_seconds == pytest.approx(4 * 16, rel=1e-12)


def test_the_parts_add_up_to_the_step() -> None:
    meters = meters_of(tiny_run(), world_size=1, device=CPU, first_step=0)
    time.sleep(10 * PAUSE_SECONDS)
    parts = {"data_wait": 0.001, "forward": 0.002, "backward": 0.004, "optimizer": 0.003}
    cost = meters.measure(parts, 0.001, checkpoint_seconds=0.005, validation_seconds=0.0025)
    named = [cost.data_wait_seconds, cost.forward_seconds, cost.backward_seconds, cost.optimizer_seconds]
    assert named == list(parts.values()) and cost.checkpoint_seconds == 0.005
    assert cost.other_seconds == pytest.approx(cost.step_seconds - 0.015 - cost.validation_seconds, rel=1e-9)
    # On a GPU the parts may include time of the previous step, so their sum may exceed this step.
    assert meters.measure({**NO_TIME, "forward": 3600.0}).other_seconds == 0.0


def test_names_in_a_record_have_units_and_there_is_no_forecast() -> None:
    record = cost_of(1234.5678, 0.43214321, 2**30, 7.0).as_record()
    assert (record["tokens_per_second"], record["mfu"], record["step_seconds"]) == (1234.6, 0.43214, 0.5)
    assert record["memory_bytes"] == 2**30 and isinstance(record["memory_bytes"], int)
    rates = {"tokens_per_second", "mfu", "mfu_exact", "hfu"}
    assert all(name.endswith(("_seconds", "_bytes")) for name in set(record) - rates)
    assert "remaining_seconds" not in record
    assert cost_of(1.0, None, 1, 0.0).as_record()["hfu"] is None


def test_current_cpu_memory_follows_allocations() -> None:
    before = memory_bytes(CPU)
    # Mapped directly from the kernel: an allocator might not return the memory at once. The size is far above the error
    # of the kernel's accounting.
    size = 256 * 2**20
    with mmap.mmap(-1, size) as block:
        block.write(bytes(size))
        held = memory_bytes(CPU)
    assert held - before > size // 2
    assert held - memory_bytes(CPU) > size // 2
    cost = meters_of(tiny_run(), world_size=1, device=CPU, first_step=0).measure(NO_TIME)
    assert 50 * 2**20 < cost.memory_bytes <= cost.peak_memory_bytes


def test_peak_cpu_memory_is_of_this_process_and_in_bytes() -> None:
    before = peak_memory_bytes(CPU)
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    # A process that has loaded torch uses at least 50 MB; more than 1 TB would mean a wrong unit.
    assert 50 * 2**20 < before <= peak_memory_bytes(CPU) < 2**40
    assert block.numel() == 64 * 2**20


@on_gpu[0]
@on_gpu[1]
def test_a_gpu_has_memory_values_and_an_mfu_if_its_peak_is_known() -> None:
    device = torch.device("cuda", 0)
    block = torch.ones(2**20, device=device)
    run = tiny_run()
    meters = meters_of(run, world_size=2, device=device, first_step=0)
    time.sleep(PAUSE_SECONDS)
    cost = meters.measure(NO_TIME)
    assert cost.peak_memory_bytes >= cost.memory_bytes >= block.numel() * 4
    assert meters.measure(NO_TIME, graph_bytes=2**40).memory_bytes >= 2**40
    if "H200" in torch.cuda.get_device_name(device):
        shape, length = run.model.shape, run.train.sequence_length
        per_peak = cost.tokens_per_second / (2 * 989e12)
        assert cost.mfu == pytest.approx(per_peak * flops_per_token(shape, length, "origin"), rel=1e-9)
        assert cost.mfu_exact == pytest.approx(per_peak * flops_per_token(shape, length, "exact"), rel=1e-9)
        executed = hardware_flops_per_token(shape, length, cross_entropy="chunked")
        assert cost.hfu == pytest.approx(per_peak * executed, rel=1e-9)


def test_the_line_of_a_step_shows_all_values() -> None:
    cost = cost_of(123456.7, 0.4321, 3 * 2**30, 3725.0)
    assert step_line(25, 1000, 2.34567, 3e-4, 0.98765, cost) == (
        "step 25/1000 | 2% | loss 2.3457 | lr 3.00e-04 | grad 0.988 | 123,457 tok/s | MFU 43.2% | mem 3.0 GiB"
        " | ETA 1h02m"
    )


def test_the_line_of_a_step_shows_a_dash_for_unknown_values() -> None:
    cost = cost_of(10.0, None, 2**20, 0.0)
    line = step_line(3, 3, float("nan"), 0.0, None, cost)
    assert " | grad - | " in line
    assert " | MFU - | " in line
    assert "loss nan" in line
    assert line.startswith("step 3/3 | 100% | ")
