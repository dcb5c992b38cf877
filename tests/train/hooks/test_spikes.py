"""Real runs on a corpus with some poisoned documents: with the guard they reach the loss of a run on clean text."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.training import losses, metrics, run_arguments, train_many
from z2all_ds.base.errors import TrainingError
from z2all_ds.corpus import SourceSpec, build_corpus

pytestmark = pytest.mark.extended

SENTENCES = [
    f"The {who} {does} the {what} in the morning."
    for who in ("cat", "dog")
    for does in ("sees", "hears")
    for what in ("sun", "rain")
]
STEPS = 120
POLICIES = ("skip", "rollback")
POISONED = range(9, 209, 10)
"""Numbers of the documents in the poisoned corpus."""


def write_corpus(folder: Path, poisoned: bool) -> Path:
    """Write a corpus of simple sentences and return its folder; if poisoned, some documents are random characters."""
    draw = random.Random(5)
    texts = [" ".join(draw.choices(SENTENCES, k=40)) for _ in range(200)]
    if poisoned:
        for place in POISONED:
            texts.insert(place, "".join(chr(draw.randrange(0x4E00, 0x9FFF)) for _ in range(20)))
    folder.mkdir()
    file = folder / "plain.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    build_corpus(folder / "corpus", [SourceSpec("plain", "jsonl", (file,))])
    return folder / "corpus"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("spikes")
    clean, poisoned = write_corpus(folder / "clean_text", False), write_corpus(folder / "poisoned_text", True)

    def arguments(name: str, corpus: Path, *more: str) -> list[str]:
        common = (
            "deepspeed=zero2",
            f"train.steps={STEPS}",
            "optimizer.lr=0.01",
            f"validation.corpus={clean}",
            f"validation.every_steps={STEPS}",
            "validation.samples=32",
            "checkpoint.every_steps=20",
            "checkpoint.at_end=false",
            "guard.min_steps=16",
            "guard.deviations=6",
            "train.log_every=40",
        )
        return run_arguments(folder / name, corpus, small_tokenizer, *common, *more)

    plan = [arguments("clean", clean)]
    plan += [arguments(policy, poisoned, f"guard.policy={policy}") for policy in POLICIES]
    # Snapshots are taken at the steps at which the other run has checkpoints, and no checkpoint is written.
    in_memory = ("guard.policy=rollback", "checkpoint.snapshot_every=20", "checkpoint.every_steps=1000")
    plan += [arguments("rollback_in_memory", poisoned, *in_memory)]
    plan += [arguments("warn", poisoned, "guard.policy=warn")]
    plan += [arguments("stop", poisoned, "guard.policy=stop"), arguments("few", poisoned, "guard.max_bad_steps=1")]
    plan += [arguments("broken", clean, "optimizer.lr=1e30", "train.steps=8", "schedule.warmup_steps=0")]
    wrong = TrainingError.exit_code
    assert train_many(folder, plan) == [0, 0, 0, 0, 0, wrong, 0, wrong]
    bad = [event["skipped_samples"] for event in events(folder / "rollback", "rolled_back")]
    assert train_many(folder, [arguments("never_read", poisoned, f"data.skip_samples={bad}")]) == [0]
    return folder


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] == kind]


def test_clean_text_causes_no_spike(runs: Path) -> None:
    assert events(runs / "clean", "spike") == []
    assert losses(runs / "clean")[-1] < 0.5 * losses(runs / "clean")[0]


def test_skipped_steps_hardly_change_the_final_validation_loss(runs: Path) -> None:
    assert events(runs / "skip", "spike")
    found, clean = (metrics(runs / name)[-1]["validation_loss"] for name in ("skip", "clean"))
    assert found == pytest.approx(clean, rel=0.01)


def test_after_rollbacks_losses_are_those_of_a_run_that_never_read_the_bad_samples(runs: Path) -> None:
    assert events(runs / "rollback", "rolled_back") and not events(runs / "never_read", "spike")
    assert losses(runs / "rollback") == losses(runs / "never_read")


def test_a_spike_event_names_values_limits_and_documents(runs: Path) -> None:
    event = events(runs / "skip", "spike")[0]
    assert event["taken"] is False and "loss" in event["outliers"]
    assert event["values"]["loss"] > event["limits"]["loss"]
    first, end = event["samples"]
    assert (first, end) == (8 * (event["step"] - 1), 8 * event["step"])
    poison = [document for document in event["documents"] if document["record"] in POISONED]
    assert poison and {"sample", "shard", "domain"} <= set(poison[0]) and first <= poison[0]["sample"] < end


def test_only_skipped_steps_are_marked_as_not_taken(runs: Path) -> None:
    bad = {event["step"] for event in events(runs / "skip", "spike")}
    records = metrics(runs / "skip")
    assert {record["step"] for record in records if not record["step_taken"]} == bad
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))


def test_after_rollbacks_every_step_is_recorded_once_and_bad_data_is_skipped(runs: Path) -> None:
    run = runs / "rollback"
    assert [record["step"] for record in metrics(run)] == list(range(1, STEPS + 1))
    spikes, back = events(run, "spike"), events(run, "rolled_back")
    assert back and all(event["step"] % 20 == 0 and event["step"] < event["from_step"] for event in back)
    skipped = [tuple(event["skipped_samples"]) for event in back]
    assert len(skipped) == len(set(skipped))
    state = json.loads(max(run.glob("data_states/step_*.json")).read_text())
    inside = [any(first <= a and b <= end for first, end in state["skip"]) for a, b in skipped]
    assert inside.count(False) <= 1, "all but one after the last checkpoint are in its state"
    # A spike before the first checkpoint causes no rollback.
    assert len(spikes) >= len(back)


def test_rollbacks_to_snapshots_and_to_checkpoints_give_the_same_losses(runs: Path) -> None:
    run = runs / "rollback_in_memory"
    assert losses(run) == losses(runs / "rollback")
    assert len(events(run, "rolled_back")) == len(events(runs / "rollback", "rolled_back"))
    assert events(run, "checkpoint") == [] and list((run / "checkpoints").iterdir()) == []


def test_the_warn_policy_takes_the_step(runs: Path) -> None:
    assert {event["taken"] for event in events(runs / "warn", "spike")} == {True}
    assert all(record["step_taken"] for record in metrics(runs / "warn"))


def test_runs_that_stop_or_give_up_log_the_reason(runs: Path) -> None:
    def log(run: str) -> str:
        return (runs / run / "logs" / "rank_0000.log").read_text()

    assert len(events(runs / "stop", "spike")) == 1
    assert "guard.policy=stop" in log("stop")
    assert events(runs / "stop", "failed")[-1]["reason"].startswith("TrainingError: ")
    assert "not finite 3 times in a row: the weights are corrupt" in log("broken")
    assert not list((runs / "broken" / "checkpoints").glob("step_*"))


def test_many_bad_steps_are_a_new_level_and_do_not_end_the_run(runs: Path) -> None:
    levels = events(runs / "few", "new_level")
    assert levels and levels[0]["step"] == events(runs / "few", "spike")[1]["step"]
    assert metrics(runs / "few")[-1]["step"] == STEPS
    assert "guard.max_bad_steps=1" in (runs / "few" / "logs" / "rank_0000.log").read_text()
