"""`z2all bench checkpoint` in a short real measurement; figures are compared with each other, not with fixed times."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.training import MICRO_OVERRIDES
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.base.reports import Table
from z2all_ds.bench.checkpoint import METHODS, bench_checkpoint, describe


def test_the_measured_figures_are_consistent(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "z2all_ds", "bench", "checkpoint", "--ranks", "2", "--rounds", "3", "--json"]
    result = subprocess.run(
        [*command, "--dir", str(tmp_path), *MICRO_OVERRIDES, "deepspeed=zero1"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    parameters = 2 * 1024 * 32 + 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 88 + 2 * 32) + 32
    assert figures["state_bytes"] == 3 * 4 * parameters
    assert (figures["ranks"], figures["deepspeed_json"], figures["dtype"]) == (2, "zero1", "fp32")
    for method in METHODS:
        one = figures[method]
        assert len(one["blocked_seconds"]) == len(one["total_seconds"]) == 3
        assert one["blocked_seconds_median"] == statistics.median(one["blocked_seconds"][1:])
        assert one["share_of_time_at_one_a_minute"] == one["blocked_seconds_median"] / 60
        assert one["bytes_per_second"] == figures["state_bytes"] / one["total_seconds_median"]
    assert figures["deepspeed"]["restore_seconds"] > 0 and figures["z2all"]["restore_from_memory_seconds"] > 0
    assert list(tmp_path.iterdir()) == []
    head, table, *_ = describe(figures)
    assert isinstance(head, str) and head.endswith("/s") and isinstance(table, Table)
    assert [row[0] for row in table.rows] == list(METHODS.values())


def test_invalid_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rounds=1"):
        bench_checkpoint(None, [], 1, tmp_path, rounds=1)
    with pytest.raises(ConfigError, match=r"train\.stepz"):
        bench_checkpoint(None, ["train.stepz=5"], 1, tmp_path, rounds=2)
    with pytest.raises(MachineError, match=r"the ranks failed: ConfigError: .*zero4"):
        bench_checkpoint(None, [*MICRO_OVERRIDES, "deepspeed=zero4"], 1, tmp_path, rounds=2)
