"""Exports during a real run: they match an export by hand, do not affect training, and log one line if they fail."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import equal

from tests.helpers.training import losses, train
from z2all_ds.export.to_hf import export_checkpoint

EXPORTING = ("deepspeed=zero2", "checkpoint.every_steps=4", "export.every_steps=4", "export.dtype=fp32")


@pytest.mark.extended
def test_exports_during_training_equal_an_export_by_hand(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    run = tmp_path / "run"
    result = train(run, small_corpus, small_tokenizer, *EXPORTING, ranks=1)
    assert result.returncode == 0, result.stderr
    assert "export of step_00000004 started in the background" in result.stderr
    assert "exported step_00000012: " in result.stderr and "logits within" in result.stderr
    # The first and the last export always run. The one of step 8 is replaced if it still waits when step 12 is saved.
    assert {path.name for path in (run / "exports").iterdir()} >= {"step_00000004", "step_00000012"}
    by_hand = export_checkpoint(run / "checkpoints" / "step_00000012", tmp_path / "by_hand", "fp32").folder
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run / "exports" / "step_00000012", by_hand))
    assert ours.keys() == theirs.keys() and all(equal(ours[name], theirs[name]) for name in ours)


def test_a_failed_export_logs_one_line_and_training_completes(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    run = tmp_path / "run"
    (run / "exports").mkdir(parents=True)
    for step in (4, 8, 12):
        (run / "exports" / f"step_{step:08d}").write_text("in the way")
    result = train(run, small_corpus, small_tokenizer, *EXPORTING, ranks=1)
    assert result.returncode == 0, result.stderr
    assert "export of step_00000012 failed (exit code 2: ConfigError: --out" in result.stderr
    assert len(losses(run)) == 12
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert events[-1] == "done"
