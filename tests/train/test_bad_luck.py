"""Errors before the launch and in the ranks: one clear line, the right exit code, and no lost results."""

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.training import losses, metrics, run_arguments, train, train_many


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("model.vocab_size=512", 3, ["1012 ids", "model.vocab_size=512", "1024"]),
        ("data.weights={code: 1, poetry: 1}", 2, ["poetry", "code"]),
        ("ops.attention=flashy", 2, ["ops.attention", "sdpa", "eager"]),
        ("data.num_lanes=1", 2, ["ranks=2", "1 lanes", "at most 1 ranks"]),
        ("train.global_batch=6", 2, ["train.global_batch=6", "2 × 2", "1, 3"]),
        ("deepspeed=zero4", 2, ["zero4", "zero0, zero1, zero1_fp16, zero2"]),
        ("data.tokenizer=/nowhere", 3, ["/nowhere", "no such folder"]),
        ("data.corpus=/nowhere", 3, ["data.corpus=/nowhere", "no such folder", "z2all corpus build"]),
        ("run_dir=/dev/null/run", 2, ["/dev/null/run", "part of it is a file"]),
    ],
)
def test_an_input_error_is_one_line_before_any_rank_starts(
    override: str, code: int, words: list[str], tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    result = train(tmp_path / "run", small_corpus, small_tokenizer, override)
    assert result.returncode == code, result.stderr
    (line,) = result.stderr.splitlines()
    assert all(word in line for word in words), line
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def after_bad_luck(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> Path:
    """Launch healthy runs, damage a checkpoint and change the corpus, launch the runs again; return their folder."""
    folder = tmp_path_factory.mktemp("bad_luck")
    changed = folder / "changed_corpus"
    shutil.copytree(small_corpus, changed)
    manifest = json.loads((changed / "MANIFEST.json").read_text())
    manifest["shards"] = manifest["shards"][:-1]
    (changed / "MANIFEST.json").write_text(json.dumps(manifest))

    def arguments(run: str, *overrides: str, corpus: Path = small_corpus) -> list[str]:
        return run_arguments(folder / run, corpus, small_tokenizer, "deepspeed=zero2", *overrides)

    flipped = arguments("flipped", "checkpoint.every_steps=2", "train.steps=6")
    unfinished = ("train.steps=4", "schedule.warmup_steps=1")
    plan = [flipped, *(arguments(run, *unfinished, "train.stop_at_step=2") for run in ("moved", "turned"))]
    assert train_many(folder, plan) == [0, 0, 0]

    shutil.copy(folder / "flipped" / "metrics.jsonl", folder / "metrics_before.jsonl")
    victim = folder / "flipped" / "checkpoints" / "step_00000006" / "state" / "rank_00001.safetensors"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)

    shutil.copytree(folder / "turned", folder / "other_loss")
    trainer = folder / "other_loss" / "checkpoints" / "step_00000002" / "trainer.json"
    loss = json.loads(trainer.read_text())["probe"]["loss"]
    trainer.write_text(trainer.read_text().replace(f"{loss}", f"1{loss}"[: len(f"{loss}")]))

    plan = [
        flipped,
        arguments("moved", *unfinished, corpus=changed),
        arguments("moved", *unfinished, "data.allow_change=true", corpus=changed),
        arguments("forced", "ops.rope=liger"),
        [*arguments("asked"), "--resume", str(folder / "asked" / "checkpoints" / "step_00000099")],
        arguments("turned", *unfinished, "model.rope_theta=500"),
        arguments("turned", *unfinished, "model.rope_theta=500", "checkpoint.allow_model_change=true"),
        arguments("other_loss", *unfinished, "checkpoint.verify_checksums=false"),
        [*flipped, "--resume", "never"],
    ]
    assert train_many(folder, plan) == [0, 3, 0, 2, 4, 4, 0, 4, 4]
    return folder


def log_of(run: Path) -> str:
    return (run / "logs" / "rank_0000.log").read_text()


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(after_bad_luck: Path) -> None:
    run = after_bad_luck / "flipped"
    reason = "state/rank_00001.safetensors does not match its checksum"
    assert f"checkpoint step_00000006 skipped: {reason}" in log_of(run)
    assert "resumed from step_00000004" in log_of(run)
    before = [json.loads(line)["loss"] for line in (after_bad_luck / "metrics_before.jsonl").read_text().splitlines()]
    assert losses(run) == before


def test_a_start_from_step_0_is_refused_if_checkpoints_exist(after_bad_luck: Path) -> None:
    """The fixture tries this last: the log ends with the error, and the metrics of the run are complete."""
    *_, last = log_of(after_bad_luck / "flipped").strip().splitlines()
    assert last.startswith("CheckpointError: start from step 0") and "step_00000006" in last
    assert len(metrics(after_bad_luck / "flipped")) == 6


def test_a_changed_corpus_prevents_the_resume_unless_allowed(after_bad_luck: Path) -> None:
    run = after_bad_luck / "moved"
    line = next(line for line in log_of(run).splitlines() if line.startswith("DataError"))
    assert "domain 'zh' has changed (149 documents, now 105)" in line and "data.allow_change=true" in line
    assert [record["step"] for record in metrics(run)] == [1, 2, 3, 4]
    change = "domain 'zh' has changed (149 documents, now 105)"
    assert any("data changed since then: " in line and change in line for line in log_of(run).splitlines())
    started = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert change in [event for event in started if event["event"] == "started"][-1]["changed_data"]


def test_a_forced_backend_that_cannot_run_is_refused_with_the_reason(after_bad_luck: Path) -> None:
    line = next(line for line in log_of(after_bad_luck / "forced").splitlines() if line.startswith("ConfigError"))
    assert "ops.rope=liger" in line and "needs a GPU" in line
    assert not (after_bad_luck / "forced" / "checkpoints").exists()


def test_a_missing_checkpoint_is_an_error_instead_of_a_start_from_step_0(after_bad_luck: Path) -> None:
    line = next(line for line in log_of(after_bad_luck / "asked").splitlines() if line.startswith("CheckpointError"))
    assert "step_00000099" in line and "no such folder" in line
    assert not (after_bad_luck / "asked" / "metrics.jsonl").exists()


def test_a_model_that_differs_from_the_saved_one_is_refused_unless_allowed(after_bad_luck: Path) -> None:
    run = after_bad_luck / "turned"
    line = next(line for line in log_of(run).splitlines() if line.startswith("CheckpointError"))
    assert line.startswith("CheckpointError: model.rope_theta=500") and "checkpoint.allow_model_change=true" in line
    assert [record["step"] for record in metrics(run)] == [1, 2, 3, 4]


def test_another_loss_than_the_saved_one_is_refused(after_bad_luck: Path) -> None:
    run = after_bad_luck / "other_loss"
    line = next(line for line in log_of(run).splitlines() if line.startswith("CheckpointError"))
    assert "on the same tokens when it was saved" in line and "checkpoint.check_continuity=false" in line
    assert [record["step"] for record in metrics(run)] == [1, 2]
    assert "verify_checksums: true" in (run / "run.yaml").read_text()  # that of the accepted start
