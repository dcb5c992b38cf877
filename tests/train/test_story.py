"""A complete training: batch warm-up, a long-context stage, an annealing stage; two interruptions change nothing."""

import json
from pathlib import Path

import pytest

from tests.helpers.training import metrics, run_arguments, train_many

STORY = (
    "train.steps=24",
    "train.global_batch=16",
    "train.batch_warmup_from=8",
    "train.batch_warmup_steps=3",
    "schedule.kind=constant",
    "schedule.min_ratio=0.0",
    "stages=[{name: pretrain, steps: 12},"
    " {name: long context, steps: 6, sequence_length: 64, global_batch: 8, rope_theta: 50000},"
    " {name: anneal, weights: {code: 1, en: 2}, anneal: one_minus_sqrt}]",
    "validation.every_steps=6",
    "validation.samples=8",
    "checkpoint.every_steps=5",
)
COMPARED = ("step", "tokens_seen", "loss", "lr", "grad_norm", "validation_loss")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("story")

    def arguments(run: str, *more: str) -> list[str]:
        held_out = f"validation.corpus={small_corpus}"
        return run_arguments(folder / run, small_corpus, small_tokenizer, "deepspeed=zero1", *STORY, held_out, *more)

    # The first stop is in the middle of the second stage, the second one step into the third.
    stops = [arguments("stopped", "train.stop_at_step=14"), arguments("stopped", "train.stop_at_step=19")]
    plan = [arguments("unbroken"), *stops, arguments("stopped")]
    assert train_many(folder, plan) == [0] * len(plan)
    return folder


def test_two_interruptions_change_no_recorded_value(runs: Path) -> None:
    def figures(run: str) -> list[dict[str, object]]:
        return [{key: record.get(key) for key in COMPARED} for record in metrics(runs / run)]

    assert figures("stopped") == figures("unbroken")
    events = [json.loads(line) for line in (runs / "stopped" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "started"] == [0, 14, 19]


def test_batch_size_rate_validation_and_mixture_are_as_configured(runs: Path) -> None:
    records = metrics(runs / "unbroken")
    tokens = [record["tokens_seen"] for record in records]
    assert [after - before for before, after in zip([0, *tokens], tokens, strict=False)] == (
        [8 * 32] * 3 + [16 * 32] * 9 + [8 * 64] * 6 + [16 * 32] * 6
    )
    rates = [record["lr"] for record in records]
    # The rate warms up for three steps, stays constant until the last stage, then falls to 0.
    assert rates[2:18] == [0.003] * 16 and rates[-1] == 0.0
    assert rates[17:] == sorted(rates[17:], reverse=True) and len(set(rates[18:])) == 6
    assert {record["step"] for record in records if "validation_loss" in record} == {6, 12, 18, 24}
    assert records[-1]["validation_loss"] < records[5]["validation_loss"]
    last_stage = {key for record in records[18:] for key in record if key.startswith("loss_of_")}
    assert last_stage == {"loss_of_code", "loss_of_en"}
