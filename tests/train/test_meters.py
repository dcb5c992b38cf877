"""What a step cost, and the line that says so."""

import time

import pytest
import torch

from tests.ops.comparing import on_gpu
from z2all_ds.accounting import flops_per_token
from z2all_ds.config import RunConfig, load_run_config
from z2all_ds.run_stages import RunStage, run_stages
from z2all_ds.train.meters import WINDOW_STEPS, Meters, StepCost, peak_memory_bytes, step_line

CPU = torch.device("cpu")
PAUSE_SECONDS = 0.002


def tiny_run(steps: int = 100, stages: str = "[]") -> RunConfig:
    batch = ("train.global_batch=8", "train.micro_batch=2")
    return load_run_config("z2all_tiny", [f"train.steps={steps}", *batch, f"stages={stages}"])


def only_stage(run: RunConfig) -> RunStage:
    (stage,) = run_stages(run)
    return stage


def test_figures_of_one_step_belong_together() -> None:
    run = tiny_run(steps=10)
    meters = Meters(run, only_stage(run), world_size=1, device=CPU, first_step=6)
    time.sleep(PAUSE_SECONDS)
    cost = meters.measure()
    assert cost.step_seconds >= PAUSE_SECONDS
    tokens = run.train.global_batch * run.train.sequence_length
    assert cost.tokens_per_second * cost.step_seconds == pytest.approx(tokens, rel=1e-12)
    assert cost.remaining_seconds == pytest.approx(3 * cost.step_seconds, rel=1e-12)  # steps 8, 9 and 10
    assert cost.mfu is None  # nobody knows a CPU's peak


def test_nothing_remains_after_the_last_step() -> None:
    run = tiny_run(steps=2)
    meters = Meters(run, only_stage(run), world_size=1, device=CPU, first_step=0)
    costs = []
    for _ in range(2):
        time.sleep(PAUSE_SECONDS)
        costs.append(meters.measure())
    assert costs[0].remaining_seconds > 0
    assert costs[1].remaining_seconds == 0


def test_rate_is_a_mean_over_the_window_alone() -> None:
    run = tiny_run()
    meters = Meters(run, only_stage(run), world_size=1, device=CPU, first_step=0)
    costs = []
    for _ in range(WINDOW_STEPS + 3):
        time.sleep(PAUSE_SECONDS)
        costs.append(meters.measure())
    tokens = run.train.global_batch * run.train.sequence_length
    window = sum(cost.step_seconds for cost in costs[-WINDOW_STEPS:])
    assert costs[-1].tokens_per_second == pytest.approx(tokens * WINDOW_STEPS / window, rel=1e-9)


def test_tokens_are_those_of_the_stage_and_what_remains_is_that_of_the_run() -> None:
    run = tiny_run(steps=10, stages="[{name: a, steps: 4}, {name: b, global_batch: 4, sequence_length: 16}]")
    meters = Meters(run, run_stages(run)[1], world_size=1, device=CPU, first_step=4)
    time.sleep(PAUSE_SECONDS)
    cost = meters.measure()
    assert cost.tokens_per_second * cost.step_seconds == pytest.approx(4 * 16, rel=1e-12)
    assert cost.remaining_seconds == pytest.approx(5 * cost.step_seconds, rel=1e-12)


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
    meters = Meters(run, only_stage(run), world_size=2, device=device, first_step=0)
    time.sleep(PAUSE_SECONDS)
    cost = meters.measure()
    assert cost.peak_memory_bytes >= block.numel() * 4
    if "H200" in torch.cuda.get_device_name(device):
        per_second = cost.tokens_per_second * flops_per_token(run.model.shape, run.train.sequence_length, "origin")
        assert cost.mfu == pytest.approx(per_second / (2 * 989e12), rel=0.01)


def test_step_line() -> None:
    cost = StepCost(0.5, 123456.7, 0.4321, 3 * 2**30, 3725.0)
    assert step_line(25, 1000, 2.34567, 3e-4, 0.98765, cost) == (
        "step 25/1000 | 2% | loss 2.3457 | lr 3.00e-04 | grad 0.988 | 123,457 tok/s | MFU 43.2% | mem 3.0 GiB"
        " | ETA 1h02m"
    )


def test_step_line_without_what_is_not_known() -> None:
    cost = StepCost(0.5, 10.0, None, 2**20, 0.0)
    line = step_line(3, 3, float("nan"), 0.0, None, cost)
    assert " | grad - | " in line
    assert " | MFU - | " in line
    assert "loss nan" in line
    assert line.startswith("step 3/3 | 100% | ")
