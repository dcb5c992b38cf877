"""A real short measurement through the command; figures are checked against each other, not against the clock."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.training import MICRO_OVERRIDES
from z2all_ds.base.errors import ConfigError
from z2all_ds.bench.step import StepCosts, bench_step, beside_floor, describe, floor_in_own_process


def test_the_figures_belong_together(small_corpus: Path, small_tokenizer: Path) -> None:
    folders = (f"data.corpus={small_corpus}", f"data.tokenizer={small_tokenizer}")
    command = [sys.executable, "-m", "z2all_ds", "bench", "step", "--ranks", "1", "--steps", "6", "--floor", "--json"]
    result = subprocess.run([*command, *MICRO_OVERRIDES, *folders], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    costs = json.loads(result.stdout)
    assert costs["steps"] == 6
    assert costs["tokens_per_second"] == pytest.approx(8 * 32 / costs["seconds_per_step"])
    assert costs["ranks"] == 1 and costs["deepspeed"] == "zero2"
    assert costs["mfu_origin"] is costs["mfu_exact"] is costs["hfu"] is None  # no peak is known for a CPU
    assert costs["peak_memory_bytes"] > 100_000_000
    assert costs["ops"]["attention"] == "sdpa"
    assert "saved step" not in result.stderr
    assert costs["floor_tokens_per_second"] > 0
    assert costs["share_of_floor"] == pytest.approx(costs["tokens_per_second"] / costs["floor_tokens_per_second"])


def test_a_floor_that_cannot_be_measured_costs_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert floor_in_own_process(None, ["train.stepz=5"]) is None
    error, ours = capfd.readouterr().err.splitlines()
    assert error.startswith("ConfigError: train.stepz")
    assert ours == "no floor: `z2all bench floor` ended with code 2"


@pytest.mark.parametrize(("measured_on", "floor"), [({"device": "H200", "cuda": "13.0"}, 4000.0), ({}, 1000.0)])
def test_each_gpu_rank_has_a_device_and_cpu_ranks_share_one(measured_on: dict[str, str], floor: float) -> None:
    costs = StepCosts("", 4, "zero2", 1, 32, 8, 2, 6, 1.0, 500.0, None, None, 1, 1.0, {}, {})
    assert costs.floor_tokens_per_second is None and costs.share_of_floor is None
    beside = beside_floor(costs, {"measured_on": measured_on, "tokens_per_second": 1000.0})
    assert (beside.floor_tokens_per_second, beside.share_of_floor) == (floor, 500 / floor)
    assert f"{100 * 500 / floor:.1f}% of the floor" in str(next(iter(describe(beside))))


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps=3"):
        bench_step(None, [], 1, 3)
