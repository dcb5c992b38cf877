"""What a step cost, and the line that says so."""

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


def test_figures_of_one_step_belong_together() -> None:
    run = tiny_run(steps=10)
    meters = meters_of(run, world_size=1, device=CPU, first_step=6)
    time.sleep(PAUSE_SECONDS)
    cost = meters.measure(NO_TIME)
    assert cost.step_seconds >= PAUSE_SECONDS
    tokens = run.train.global_batch * run.train.sequence_length
    assert cost.tokens_per_second * cost.step_seconds == pytest.approx(tokens, rel=1e-12)
    assert cost.remaining_seconds == pytest.approx(3 * cost.step_seconds, rel=1e-12)  # steps 8, 9 and 10
    assert cost.mfu is cost.mfu_exact is cost.hfu is None  # nobody knows a CPU's peak


def test_nothing_remains_after_the_last_step() -> None:
    run = tiny_run(steps=2)
    meters = meters_of(run, world_size=1, device=CPU, first_step=0)
    costs = []
    for _ in range(2):
        time.sleep(PAUSE_SECONDS)
        costs.append(meters.measure(NO_TIME))
    assert costs[0].remaining_seconds > 0
    assert costs[1].remaining_seconds == 0


def test_rate_is_a_mean_over_the_window_alone() -> None:
    run = tiny_run()
    meters = meters_of(run, world_size=1, device=CPU, first_step=0)
    costs = []
    for _ in range(WINDOW_STEPS + 3):
        time.sleep(PAUSE_SECONDS)
        costs.append(meters.measure(NO_TIME))
    tokens = run.train.global_batch * run.train.sequence_length
    window = sum(cost.step_seconds for cost in costs[-WINDOW_STEPS:])
    assert costs[-1].tokens_per_second == pytest.approx(tokens * WINDOW_STEPS / window, rel=1e-9)


def test_tokens_are_those_of_the_stage_and_what_remains_is_that_of_the_run() -> None:
    run = tiny_run(steps=10, stages="[{name: a, steps: 4}, {name: b, global_batch: 4, sequence_length: 16}]")
    meters = Meters(run, world_size=1, device=CPU, first_step=4)
    meters.begin_stage(run_stages(run)[1])
    time.sleep(PAUSE_SECONDS)
    cost = meters.measure(NO_TIME)
    assert cost.tokens_per_second * cost.step_seconds == pytest.approx(4 * 16, rel=1e-12)
    assert cost.remaining_seconds == pytest.approx(5 * cost.step_seconds, rel=1e-12)


def test_no_time_is_lost_between_two_stages_and_rates_begin_anew() -> None:
    run = tiny_run(steps=10, stages="[{name: a, steps: 4}, {name: b, global_batch: 4, sequence_length: 16}]")
    first, second = run_stages(run)
    meters = Meters(run, world_size=1, device=CPU, first_step=3)
    meters.begin_stage(first)
    time.sleep(PAUSE_SECONDS)
    meters.measure(NO_TIME)
    time.sleep(PAUSE_SECONDS)  # a checkpoint, say
    meters.begin_stage(second)
    cost = meters.measure(NO_TIME, checkpoint_seconds=PAUSE_SECONDS)
    assert cost.step_seconds >= cost.checkpoint_seconds == PAUSE_SECONDS
    assert cost.tokens_per_second * cost.step_seconds == pytest.approx(4 * 16, rel=1e-12)


def test_parts_add_up_to_the_step() -> None:
    meters = meters_of(tiny_run(), world_size=1, device=CPU, first_step=0)
    time.sleep(10 * PAUSE_SECONDS)
    parts = {"data_wait": 0.001, "forward": 0.002, "backward": 0.004, "optimizer": 0.003}
    cost = meters.measure(parts, 0.001, checkpoint_seconds=0.005, validation_seconds=0.0025)
    named = [cost.data_wait_seconds, cost.forward_seconds, cost.backward_seconds, cost.optimizer_seconds]
    assert named == list(parts.values()) and cost.checkpoint_seconds == 0.005
    assert cost.other_seconds == pytest.approx(cost.step_seconds - 0.015 - cost.validation_seconds, rel=1e-9)
    # On a GPU parts of the step before may be among them.
    assert meters.measure({**NO_TIME, "forward": 3600.0}).other_seconds == 0.0


def test_record_has_units_in_its_names_and_no_forecast() -> None:
    record = cost_of(1234.5678, 0.43214321, 2**30, 7.0).as_record()
    assert (record["tokens_per_second"], record["mfu"], record["step_seconds"]) == (1234.6, 0.43214, 0.5)
    assert record["memory_bytes"] == 2**30 and isinstance(record["memory_bytes"], int)
    rates = {"tokens_per_second", "mfu", "mfu_exact", "hfu"}
    assert all(name.endswith(("_seconds", "_bytes")) for name in set(record) - rates)
    assert "remaining_seconds" not in record
    assert cost_of(1.0, None, 1, 0.0).as_record()["hfu"] is None


def test_cpu_memory_now_follows_what_is_held() -> None:
    before = memory_bytes(CPU)
    # Straight from the kernel, which an allocator would not give back at once; far more than its counting is off by.
    size = 256 * 2**20
    with mmap.mmap(-1, size) as block:
        block.write(bytes(size))
        held = memory_bytes(CPU)
    assert held - before > size // 2
    assert held - memory_bytes(CPU) > size // 2
    cost = meters_of(tiny_run(), world_size=1, device=CPU, first_step=0).measure(NO_TIME)
    assert 50 * 2**20 < cost.memory_bytes <= cost.peak_memory_bytes


def test_cpu_memory_is_this_process_and_in_bytes() -> None:
    before = peak_memory_bytes(CPU)
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    # A process with torch in it takes 50 MB and more; more than 1 TB would be a mistaken unit.
    assert 50 * 2**20 < before <= peak_memory_bytes(CPU) < 2**40
    assert block.numel() == 64 * 2**20


@on_gpu[0]
@on_gpu[1]
def test_gpu_has_a_memory_figure_and_an_mfu_where_its_peak_is_known() -> None:
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


def test_step_line() -> None:
    cost = cost_of(123456.7, 0.4321, 3 * 2**30, 3725.0)
    assert step_line(25, 1000, 2.34567, 3e-4, 0.98765, cost) == (
        "step 25/1000 | 2% | loss 2.3457 | lr 3.00e-04 | grad 0.988 | 123,457 tok/s | MFU 43.2% | mem 3.0 GiB"
        " | ETA 1h02m"
    )


def test_step_line_without_what_is_not_known() -> None:
    cost = cost_of(10.0, None, 2**20, 0.0)
    line = step_line(3, 3, float("nan"), 0.0, None, cost)
    assert " | grad - | " in line
    assert " | MFU - | " in line
    assert "loss nan" in line
    assert line.startswith("step 3/3 | 100% | ")
