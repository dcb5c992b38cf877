"""`z2all bench step` in a short real measurement; figures are compared with each other, not with fixed times."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.training import MICRO_OVERRIDES
from z2all_ds.base.errors import ConfigError
from z2all_ds.bench import step
from z2all_ds.bench.shared import Report
from z2all_ds.bench.step import add_floor, bench_step, describe


def costs() -> Report:
    size = {"parameters": 1_500_000, "sequence_length": 32, "global_batch": 8, "micro_batch": 2}
    shares = {"mfu_origin": 0.25, "mfu_exact": None, "hfu": None, "share_of_floor": None, "peer": None}
    speed = {"seconds_per_step": 1.0, "tokens_per_second": 500.0, "peak_memory_bytes": 2**30}
    return {"device": "H200", "ranks": 4, "deepspeed": "zero2", **size, **speed, **shares}


def test_the_measured_figures_are_consistent(small_corpus: Path, small_tokenizer: Path) -> None:
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
    assert costs["peer"] is None


def test_a_failed_floor_measurement_is_reported_and_skipped(capfd: pytest.CaptureFixture[str]) -> None:
    found = costs()
    add_floor(found, None, ["train.stepz=5"])
    assert found == costs()
    error, ours = capfd.readouterr().err.splitlines()
    assert error.startswith("ConfigError: train.stepz")
    assert ours == "no floor: `z2all bench floor` ended with code 2"


@pytest.mark.parametrize(("measured_on", "floor"), [({"device": "H200", "cuda": "13.0"}, 4000.0), ({}, 1000.0)])
def test_the_floor_is_multiplied_by_the_ranks_on_gpus_but_not_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, measured_on: dict[str, str], floor: float
) -> None:
    answer = json.dumps({"measured_on": measured_on, "tokens_per_second": 1000.0})
    monkeypatch.setattr(step, "run_process", lambda _: SimpleNamespace(returncode=0, stdout=answer))
    found = costs()
    add_floor(found, None, [])
    assert (found["floor_tokens_per_second"], found["share_of_floor"]) == (floor, 500 / floor)
    assert f"{100 * 500 / floor:.1f}% of the floor" in str(next(iter(describe(found))))


def test_describe_gives_a_line_for_the_run_and_one_for_the_peer() -> None:
    peer = {"name": "Llama", "seconds_per_step": 2.0, "tokens_per_second": 250.0, "peak_memory_bytes": 2**30}
    assert list(describe({**costs(), "peer": peer, "times_peer": 2.0})) == [
        "H200 × 4 | zero2 2/8 × 32 | 1.5 M parameters | 1.000 s/step | 500 tok/s | MFU 25.0% | peak 1.0 GiB",
        "peer: Llama | 2.000 s/step | 250 tok/s | peak 1.0 GiB | ours is 2.00 times as fast",
    ]


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps=3"):
        bench_step(None, [], 1, 3)
