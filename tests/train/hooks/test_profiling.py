"""Profiler traces of a few steps of a real run."""

import gzip
import json
from pathlib import Path

import pytest

from tests.helpers.command import one_line, z2all
from tests.helpers.training import losses, run_arguments, train_many
from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import ConfigError


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("profiled")

    def arguments(name: str, *more: str) -> list[str]:
        common = ("deepspeed=zero2", "train.steps=5", "checkpoint.at_end=false")
        return run_arguments(folder / name, small_corpus, small_tokenizer, *common, *more)

    plan = [arguments("plain"), arguments("window", "train.profile=[2, 3]"), arguments("late", "train.profile=[4, 99]")]
    assert train_many(folder, plan) == [0, 0, 0]
    return folder


def test_one_rank_writes_the_trace_of_the_window_and_losses_do_not_change(runs: Path) -> None:
    (trace,) = (runs / "window" / "profiles").iterdir()
    assert trace.name == "steps_2-3.json.gz"
    with gzip.open(trace) as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    # The trace has matrix products and both optimizer steps.
    assert any("mm" in name for name in names)
    assert sum("Optimizer.step" in name for name in names) >= 2
    assert losses(runs / "window") == losses(runs / "plain")


def test_a_run_that_ends_inside_the_window_writes_the_steps_so_far(runs: Path) -> None:
    (trace,) = (runs / "late" / "profiles").iterdir()
    assert trace.name == "steps_4-5.json.gz"
    with gzip.open(trace) as file:
        assert json.load(file)["traceEvents"]


def test_invalid_windows_are_refused(tmp_path: Path) -> None:
    for window in ("[0, 4]", "[9, 3]"):
        with pytest.raises(ConfigError, match="must be ascending and start at step 1"):
            load_run_config(None, [f"train.profile={window}"])
    for given in ("5", "a:b", "1:2:3"):
        answer = z2all("train", "--profile", given, cwd=tmp_path)
        assert "train.profile" in one_line(answer, ConfigError.exit_code)
    assert load_run_config(None, ["train.profile=[10, 15]"]).train.profile == (10, 15)
