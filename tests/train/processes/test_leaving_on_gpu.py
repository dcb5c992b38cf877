"""Two ranks that share a GPU and are asked to stop: they wait for each other through NCCL and end without faults."""

import subprocess
import time
from pathlib import Path

from tests.helpers.processes import ended
from tests.helpers.training import metrics, run_arguments
from tests.ops.comparing import on_gpu
from z2all_ds.base.errors import EXIT_REQUEUE
from z2all_ds.base.machine import free_port
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.bench.shared_gpu import shared_gpu_command

pytestmark = list(on_gpu)
PATIENCE_SECONDS = 120.0


def test_ranks_that_are_asked_to_stop_end_together(tmp_path: Path, small_corpus: Path, small_tokenizer: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    arguments = run_arguments(folder.root, small_corpus, small_tokenizer, "train.steps=1000000", "deepspeed=zero1")
    with ended(subprocess.Popen(shared_gpu_command(arguments, 2, free_port()), text=True)) as process:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not folder.metrics.exists() or len(metrics(folder.root)) < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        folder.stop_request.touch()
        assert process.wait(PATIENCE_SECONDS) == EXIT_REQUEUE
    assert not folder.faults.is_dir() or not list(folder.faults.iterdir())
