"""Batch size warm-up: it matches plain torch at every size, and an interruption during it changes no bit."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.training import losses, metrics, run_arguments, train_many
from z2all_ds.base.config import load_run_config
from z2all_ds.train.parity.compare import TOLERANCES, StepValues, differences
from z2all_ds.train.parity.reference import train_reference

STAGES = ("zero0", "zero1", "zero2", "zero3")
STEPS = 8
WARMUP = (
    "train.global_batch=16",
    "train.batch_warmup_from=4",
    "train.batch_warmup_steps=5",
    f"train.steps={STEPS}",
    "train.precision=fp32",
    "model.initializer_range=0.1",
)
"""Steps 1 and 2 have 4 samples, one micro-batch per rank; steps 3 to 5 have 8; later steps have 16."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("batch_warmup")

    def arguments(run: str, *more: str) -> list[str]:
        return run_arguments(folder / run, small_corpus, small_tokenizer, *WARMUP, *more)

    plan = [arguments(name, f"deepspeed={name}", "checkpoint.at_end=false") for name in STAGES]
    plan += [arguments("stopped", "deepspeed=zero2", "train.stop_at_step=4"), arguments("stopped", "deepspeed=zero2")]
    assert train_many(folder, plan) == [0] * len(plan)
    return folder


@pytest.fixture(scope="module")
def reference(small_corpus: Path, small_tokenizer: Path) -> list[StepValues]:
    overrides = run_arguments(Path("unused"), small_corpus, small_tokenizer, *WARMUP)
    return list(train_reference(load_run_config(None, overrides), STEPS, torch.device("cpu")))


@pytest.mark.parametrize("name", STAGES)
def test_losses_and_norms_match_plain_torch_at_every_batch_size(
    name: str, runs: Path, reference: list[StepValues]
) -> None:
    found = [StepValues(record["step"], record["loss"], record["grad_norm"]) for record in metrics(runs / name)]
    assert [one for one in differences(found, reference, TOLERANCES["fp32"]) if not one.is_within] == []


def test_tokens_per_step_grow_with_the_batch(runs: Path) -> None:
    tokens = [record["tokens_seen"] for record in metrics(runs / "zero2")]
    steps = [after - before for before, after in zip([0, *tokens], tokens, strict=False)]
    assert [count // 32 for count in steps] == [4, 4, 8, 8, 8, 16, 16, 16]


def test_stop_and_resume_during_the_warm_up_change_no_bit(runs: Path) -> None:
    assert losses(runs / "stopped") == losses(runs / "zero2")
    events = [json.loads(line) for line in (runs / "stopped" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "started"] == [0, 4]
