"""Real runs of two ranks with sinks: one is asked to stop, and one has its W&B process killed."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.fed_runs import hurt, sink_processes
from tests.helpers.processes import ended
from tests.helpers.training import losses, metrics, run_arguments, train_many
from tests.helpers.wandb_files import exit_codes, offline_rows
from tests.track.sinks.test_tensorboard_sink import points
from z2all_ds.base.errors import EXIT_REQUEUE
from z2all_ds.base.run_folder import RunFolder

COMPARED_STEPS = 12
PATIENCE_SECONDS = 120.0
STEPS = "train.steps=1000000"
"""More than any test needs: the run is asked to stop when the test has seen enough."""


def wait_for_service(other_than: tuple[int, int] | None = None) -> tuple[int, int]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (found := sink_processes(os.getpid()).get("wandb-core")) in (None, other_than):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert found
    return found


def test_a_run_asked_to_stop_sends_all_records_before_any_rank_ends(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    arguments = run_arguments(folder.root, small_corpus, small_tokenizer, STEPS, "track.wandb=offline")
    command = [sys.executable, "-m", "z2all_ds", "train", "--ranks", "2", *arguments]
    with ended(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)) as process:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not folder.metrics.exists() or len(metrics(folder.root)) < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == EXIT_REQUEUE, said
    assert not sink_processes(os.getpid())
    assert not folder.faults.is_dir() or not list(folder.faults.iterdir())
    steps = [record["step"] for record in metrics(folder.root)]
    assert [row["step"] for row in offline_rows(folder.root) if "loss" in row] == steps
    assert exit_codes(folder.root) == [0]


@pytest.mark.extended
def test_killing_wandb_does_not_change_the_losses_of_a_run(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    watched, alone = tmp_path / "watched", tmp_path / "alone"
    folder = RunFolder(watched)
    sinks = ("track.wandb=auto", "track.tensorboard=true", "track.finish_seconds=60")
    plan = [
        run_arguments(watched, small_corpus, small_tokenizer, STEPS, *sinks),
        run_arguments(alone, small_corpus, small_tokenizer, STEPS, f"train.stop_at_step={COMPARED_STEPS}"),
    ]
    with ThreadPoolExecutor() as pool:
        codes = pool.submit(train_many, tmp_path, plan)
        try:
            first = wait_for_service()
            while len(offline_rows(watched)) == 0 and len(metrics(watched)) < COMPARED_STEPS:
                time.sleep(0.1)
            hurt(first, signal.SIGKILL)
            wait_for_service(other_than=first)
        finally:
            folder.root.mkdir(exist_ok=True)
            folder.stop_request.touch()
        assert codes.result() == [EXIT_REQUEUE, 0]
    assert losses(watched)[:COMPARED_STEPS] == losses(alone)
    steps = list(range(1, len(metrics(watched)) + 1))
    assert sorted({row["step"] for row in offline_rows(watched)}) == steps
    assert [step for step, _ in points(folder.sinks / "tensorboard", "loss")] == steps
    said = folder.rank_log(0).read_text(encoding="utf-8").splitlines()
    assert sum("W&B failed (" in line for line in said) == 1
    assert sum("W&B: offline (no API key)" in line for line in said) == 1
    assert not any("has not confirmed" in line for line in said)
