"""A real short measurement through the command; figures are checked against each other, not against the clock."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.training import MICRO_OVERRIDES
from z2all_ds.bench.step import bench_step
from z2all_ds.errors import ConfigError


def test_the_figures_belong_together(small_corpus: Path, small_tokenizer: Path) -> None:
    folders = (f"data.corpus={small_corpus}", f"data.tokenizer={small_tokenizer}")
    command = [sys.executable, "-m", "z2all_ds", "bench", "step", "--ranks", "1", "--steps", "6", "--json"]
    result = subprocess.run([*command, *MICRO_OVERRIDES, *folders], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    costs = json.loads(result.stdout)
    assert costs["steps"] == 6
    assert costs["tokens_per_second"] == pytest.approx(8 * 32 / costs["seconds_per_step"])
    assert costs["ranks"] == 1 and costs["deepspeed"] == "zero2"
    assert costs["mfu_origin"] is None  # no peak is known for a CPU
    assert costs["peak_memory_bytes"] > 100_000_000
    assert costs["ops"]["attention"] == "sdpa"
    assert "saved step" not in result.stderr


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps=3"):
        bench_step(None, [], 1, 3)
