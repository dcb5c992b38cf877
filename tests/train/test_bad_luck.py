"""What goes wrong in or around the ranks: one clear line, the right exit code, nothing lost, no process left."""

import json
from pathlib import Path

import pytest

from tests.helpers.training import MICRO_OVERRIDES, losses, metrics, train


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("model.vocab_size=512", 3, ["1012 ids", "model.vocab_size=512", "1024"]),
        ("data.weights={code: 1, poetry: 1}", 2, ["poetry", "code"]),
        ("ops.attention=flashy", 2, ["ops.attention=flashy", "sdpa", "eager"]),
        ("ops.rope=liger", 2, ["ops.rope=liger", "needs a GPU"]),
        ("data.num_lanes=9", 2, ["num_lanes=9"]),
    ],
)
def test_a_mistake_met_by_the_ranks_is_one_line_from_rank_0(
    override: str, code: int, words: list[str], tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    result = train(tmp_path, small_corpus, small_tokenizer, override)
    assert result.returncode == code, result.stderr
    errors = [line for line in result.stderr.splitlines() if "Error: " in line and not line.startswith("RanksFailed")]
    assert len(errors) == 1, result.stderr
    assert all(word in errors[0] for word in words), errors
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "checkpoints").exists()


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    settings = ("deepspeed=zero2", "checkpoint.every_steps=2", "train.steps=6")
    assert train(tmp_path, small_corpus, small_tokenizer, *settings).returncode == 0
    whole = losses(tmp_path)
    victim = tmp_path / "checkpoints" / "step_00000006" / "deepspeed" / "mp_rank_00_model_states.pt"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    again = train(tmp_path, small_corpus, small_tokenizer, *settings)
    assert again.returncode == 0, again.stderr
    assert "step_00000006 skipped: deepspeed/mp_rank_00_model_states.pt does not match its checksum" in again.stderr
    assert "resumed from step_00000004" in again.stderr
    assert losses(tmp_path) == whole


def test_a_changed_corpus_stops_the_resume(tmp_path: Path, small_corpus: Path, small_tokenizer: Path) -> None:
    settings = ("deepspeed=zero2", "train.steps=4")
    assert train(tmp_path / "run", small_corpus, small_tokenizer, *settings, "train.stop_at_step=2").returncode == 0
    changed = tmp_path / "corpus"
    changed.mkdir()
    manifest = json.loads((small_corpus / "MANIFEST.json").read_text())
    for shard in manifest["shards"]:
        (changed / shard["path"]).write_bytes((small_corpus / shard["path"]).read_bytes())
    manifest["shards"] = manifest["shards"][:-1]
    (changed / "MANIFEST.json").write_text(json.dumps(manifest))
    stopped = train(tmp_path / "run", changed, small_tokenizer, *settings)
    assert stopped.returncode == 3, stopped.stderr
    assert "data.allow_change=true" in stopped.stderr
    allowed = train(tmp_path / "run", changed, small_tokenizer, *settings, "data.allow_change=true")
    assert allowed.returncode == 0, allowed.stderr
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_plain_deepspeed_launch_works(tmp_path: Path, small_corpus: Path, small_tokenizer: Path) -> None:
    """`deepspeed launch/pretrain.py ...`, without `z2all train` around it."""
    import os
    import subprocess
    import sys

    from z2all_ds.machine import default_environment, free_port

    script = Path(__file__).resolve().parents[2] / "launch" / "pretrain.py"
    folders = (f"run_dir={tmp_path}", f"data.corpus={small_corpus}", f"data.tokenizer={small_tokenizer}")
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(free_port())]
    command = [*launcher, str(script), "--deepspeed", "zero1", *MICRO_OVERRIDES, *folders, "train.steps=4"]
    environment = {**os.environ, **default_environment(2)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(losses(tmp_path)) == 4
