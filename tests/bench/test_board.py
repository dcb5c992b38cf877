"""`z2all bench board` on a short run."""

import json
from pathlib import Path

import pytest

from tests.helpers.warm_python import FRESH
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.reports import to_json
from z2all_ds.bench.board import bench_board, describe

pytestmark = pytest.mark.processes


def test_the_board_is_measured_on_a_short_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FRESH, "1")  # a fresh process, since its memory is measured
    costs = bench_board(2000, tmp_path)
    assert costs["records"] == 2000
    assert 700 < costs["file_bytes"] / costs["records"] < 1300
    assert 0 < costs["seconds_to_listening"] <= costs["seconds_to_first_curves"] <= costs["seconds_to_all"]
    assert costs["peak_memory_bytes"] < 200e6
    assert json.loads(to_json(costs)) == costs
    lines = list(describe(costs))
    assert str(lines[0]).startswith("2,000 records")
    assert list(tmp_path.iterdir()) == []
    if costs["pages"] is None:
        pytest.skip(str(lines[-1]))
    assert all(0 < page["seconds_to_curves"] <= page["seconds_to_charts"] for page in costs["pages"])


def test_too_few_records_are_refused() -> None:
    with pytest.raises(ConfigError, match="records=10: must be at least 1000"):
        bench_board(10, None)
