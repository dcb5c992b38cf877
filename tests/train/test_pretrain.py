"""The end of a rank's process, and a rank whose folder belongs to another job."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed

from z2all_ds.base import run_folder
from z2all_ds.base.errors import EXIT_OK, EXIT_REQUEUE, CheckpointError, TrainingError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.train import pretrain


@pytest.mark.parametrize(("code", "leaves"), [(EXIT_OK, True), (EXIT_REQUEUE, True), (TrainingError.exit_code, False)])
def test_after_a_success_a_rank_leaves_the_process_group(
    code: int, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of a group that is left to the interpreter's end abort the process now and then, after `done`."""
    left: list[bool] = []
    monkeypatch.setattr(pretrain, "main", lambda: code)
    monkeypatch.setattr(logging, "shutdown", lambda: None)  # it would close the handlers of pytest
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: left.append(True))
    with pytest.raises(SystemExit) as ended:
        pretrain.run()
    assert ended.value.code == code and bool(left) == leaves


def test_a_rank_that_is_refused_the_lock_leaves_no_fault_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(run_folder, "LOCK_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(pretrain, "follow_owner", lambda: None)
    output = SimpleNamespace(fail=lambda text, show: said.append(text))
    monkeypatch.setattr(pretrain, "RankOutput", lambda folder, world: output)
    folder = RunFolder(tmp_path)
    lock = folder.acquire_lock()
    try:
        assert pretrain.main([f"run_dir={tmp_path}"]) == CheckpointError.exit_code
    finally:
        os.close(lock)
    assert "another job is writing to it" in said[0]
    assert not folder.faults.exists()
