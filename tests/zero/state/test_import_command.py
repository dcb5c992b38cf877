"""Tests of `z2all checkpoint import` in a real process, and of the run that resumes from its result."""

import json
from pathlib import Path

import pytest

from tests.helpers.command import one_line, z2all
from tests.helpers.training import MICRO_OVERRIDES, losses, run_arguments, train
from tests.zero.engines import tiny_engine
from z2all_ds.checkpoint.layout import open_checkpoint
from z2all_ds.zero.state.save import restore

STAGES = (
    '[{"name": "first", "steps": 2, "weights": {"en": 1}},'
    ' {"name": "second", "global_batch": 16, "weights": {"zh": 1}}]'
)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> Path:
    """Train six steps with zero1 and a checkpoint at the third; return the run folder."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    more = ("deepspeed=zero1", "train.steps=6", "checkpoint.every_steps=3")
    answer = train(folder, small_corpus, small_tokenizer, *more, ranks=1)
    assert answer.returncode == 0, answer.stderr
    return folder


@pytest.fixture(scope="module")
def theirs(unbroken: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Save the third step with DeepSpeed, with and without the data state in client_state; return both folders."""
    folder = tmp_path_factory.mktemp("theirs")
    checkpoint = open_checkpoint(unbroken / "checkpoints" / "step_00000003")
    with tiny_engine("cpu", *MICRO_OVERRIDES, "deepspeed=zero1") as (engine, _):
        restore(engine, checkpoint)
        engine.save_checkpoint(str(folder / "with"), client_state={"data_state": checkpoint.data_state})
        engine.save_checkpoint(str(folder / "without"), tag="mine")
    return folder / "with", folder / "without"


def test_an_imported_run_resumes_bit_for_bit(
    unbroken: Path, theirs: tuple[Path, Path], small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    answer = z2all("checkpoint", "import", theirs[0], "--run", run, "--config", unbroken / "run.yaml", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    made = run / "checkpoints" / "step_00000003"
    assert answer.stdout.splitlines() == [
        f"{made}: step 3 of global_step3 (ZeRO 1, fp32, 1 rank)",
        "data: continues at sample 24, from the source's client_state",
        "random generators: seeded by train.seed=1234",
    ]
    more = ("deepspeed=zero1", "train.steps=6", "checkpoint.every_steps=3")
    trained = train(run, small_corpus, small_tokenizer, *more, ranks=1)
    assert trained.returncode == 0, trained.stderr
    assert "resumed from step_00000003" in trained.stderr + trained.stdout
    assert losses(run) == losses(unbroken)[3:]


def test_an_unknown_data_position_is_computed_from_the_step(
    theirs: tuple[Path, Path], small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    """The first three steps are two of 8 samples in the first stage and one of 16 in the second. The run resumes in the
    second stage, with zero3."""
    run = tmp_path / "run"
    settings = run_arguments(run, small_corpus, small_tokenizer, f"stages={STAGES}", "train.steps=4")
    config = tmp_path / "any.yaml"
    config.write_text("{}")
    answer = z2all("checkpoint", "import", theirs[1], "--config", config, *settings, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    first, data, _ = answer.stdout.splitlines()
    assert first.endswith("step 3 of mine (ZeRO 1, fp32, 1 rank)")
    assert data == "data: samples numbered from 32, reading from the first document of every domain"
    state = open_checkpoint(run / "checkpoints" / "step_00000003").data_state
    assert state["stage"]["name"] == "second" and state["lanes"]["0"] == [[0, 0, 0]] * len(state["domains"])
    shown = json.loads(z2all("checkpoint", "show", "--json", run, cwd=tmp_path).stdout)[0]
    assert (shown["problem"], shown["sample"], shown["deepspeed"]) == (None, 32, "zero1")
    trained = train(run, small_corpus, small_tokenizer, f"stages={STAGES}", "train.steps=4", "deepspeed=zero3", ranks=1)
    assert trained.returncode == 0, trained.stderr
    assert len(losses(run)) == 1
    # The run folder now has a run.yaml and a checkpoint of this step.
    assert "step_00000003: exists" not in trained.stderr
    line = one_line(z2all("checkpoint", "import", theirs[1], "--run", run, cwd=tmp_path), 4)
    assert "step_00000003: exists" in line


def test_refusals_are_one_line(unbroken: Path, theirs: tuple[Path, Path], tmp_path: Path) -> None:
    def refused(code: int, *arguments: str | Path) -> str:
        return one_line(z2all("checkpoint", "import", *arguments, cwd=tmp_path), code)

    config = ("--config", unbroken / "run.yaml", "--run", tmp_path / "run")
    assert "Give --run RUN_FOLDER or --config run.yaml" in refused(2, theirs[0])
    assert "has no run.yaml" in refused(4, theirs[0], "--run", tmp_path)
    assert "no such folder" in refused(4, tmp_path / "nothing", *config)
    assert "was not written by DeepSpeed's save_checkpoint" in refused(4, unbroken, *config)
    assert "in the configured model it is [1088, 32]" in refused(4, theirs[0], *config, "model.vocab_size=1088")
    assert not (tmp_path / "run" / "checkpoints").exists()
