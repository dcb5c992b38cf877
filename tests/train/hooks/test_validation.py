"""Validation loss during real runs: it changes no bit of the training and depends only on the weights."""

import math
from pathlib import Path

import pytest

from tests.helpers.training import losses, metrics, run_arguments, train, train_many
from z2all_ds.base.errors import ConfigError, DataError

STAGES = ("zero1", "zero3")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("validated")
    # Dropout uses the random state, so validation that changed the state would change the losses.
    common = ("train.steps=6", "model.dropout1=0.1", "checkpoint.at_end=false")
    looks = (f"validation.corpus={small_corpus}", "validation.samples=8")

    def arguments(name: str, deepspeed: str, *more: str) -> list[str]:
        run = folder / f"{deepspeed}_{name}"
        return run_arguments(run, small_corpus, small_tokenizer, f"deepspeed={deepspeed}", *common, *more)

    plan = []
    for deepspeed in STAGES:
        plan += [arguments("plain", deepspeed), arguments("looking", deepspeed, *looks, "validation.every_steps=2")]
    plan += [arguments("never_learning", "zero1", *looks, "validation.every_steps=1", "optimizer.lr=1e-30")]
    assert train_many(folder, plan) == [0] * len(plan)
    return folder


@pytest.mark.parametrize("deepspeed", STAGES)
def test_validation_changes_no_bit_of_the_training(deepspeed: str, runs: Path) -> None:
    looking, plain = runs / f"{deepspeed}_looking", runs / f"{deepspeed}_plain"
    assert losses(looking) == losses(plain)
    assert [record["grad_norm"] for record in metrics(looking)] == [record["grad_norm"] for record in metrics(plain)]


@pytest.mark.parametrize("deepspeed", STAGES)
def test_validation_runs_at_the_configured_steps_and_its_loss_falls(deepspeed: str, runs: Path) -> None:
    records = metrics(runs / f"{deepspeed}_looking")
    found = {record["step"]: record["validation_loss"] for record in records if "validation_loss" in record}
    assert list(found) == [2, 4, 6]
    assert found[6] < found[2]
    last = records[-1]
    assert last["validation_perplexity"] == math.exp(last["validation_loss"])
    domains = [key for key in last if key.startswith("validation_loss_of_")]
    assert domains and all(last[key.replace("loss", "perplexity")] == math.exp(last[key]) for key in domains)


def test_the_same_weights_have_the_same_validation_loss(runs: Path) -> None:
    """Dropout, which training uses here, is off during validation."""
    found = [record["validation_loss"] for record in metrics(runs / "zero1_never_learning")]
    assert len(set(found)) == 1


def test_invalid_validation_settings_are_one_line_errors(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    answer = train(tmp_path / "a", small_corpus, small_tokenizer, f"validation.corpus={tmp_path / 'none'}")
    assert answer.returncode == DataError.exit_code
    assert len(answer.stderr.splitlines()) == 1 and "none" in answer.stderr
    uneven = (f"validation.corpus={small_corpus}", "validation.samples=6")
    answer = train(tmp_path / "b", small_corpus, small_tokenizer, *uneven)
    assert answer.returncode == ConfigError.exit_code
    rule = "validation.samples=6: must be a multiple of train.micro_batch × ranks = 2 × 2. Set it to 8."
    assert answer.stderr == f"ConfigError: {rule}\n"
    assert not (tmp_path / "b").exists()  # refused before anything is written
