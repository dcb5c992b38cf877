"""The learning rate of real runs that are stopped and resumed, with the same settings and with changed ones."""

import json
from pathlib import Path

import pytest

from tests.helpers.training import metrics, run_arguments, train_many
from z2all_ds.base.config import load_run_config
from z2all_ds.base.config.stages import run_stages
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.writer import read_records
from z2all_ds.train.schedules import learning_rate

PEAK = 0.003
STAGES = (
    "stages=[{name: short, steps: 3}, {name: long, steps: 2, sequence_length: 64},"
    " {name: last, anneal: linear, weights: {zh: 1}}]"
)
"""Steps have 256 tokens in the first stage, 512 in the second and 256 in the third."""
BY_TOKENS = ("schedule.by=tokens", "schedule.kind=constant", "schedule.warmup_tokens=512", "schedule.warmup_steps=null")
ANNEALED = (STAGES, *BY_TOKENS, "train.steps=9", "schedule.min_ratio=0.5")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("schedules")

    def arguments(run: str, *overrides: str) -> list[str]:
        settings = ("deepspeed=zero1", "schedule.min_ratio=0", "schedule.warmup_steps=2")
        return run_arguments(folder / run, small_corpus, small_tokenizer, *settings, *overrides)

    default_lanes = "data.num_lanes=null"
    wsd = ("schedule.kind=wsd", "schedule.decay_steps=2")
    plan = [
        arguments("wsd", *wsd, "train.steps=6", "train.stop_at_step=4"),
        arguments("wsd", *wsd, "train.steps=8"),
        arguments("wsd", *wsd, "train.steps=12"),  # refused: the rate has already decayed
        arguments("cosine", default_lanes, "train.steps=6", "train.stop_at_step=4"),
        arguments("cosine", default_lanes, "train.steps=8"),
        arguments("cosine", default_lanes, "train.steps=8", "schedule.allow_jump=true", "train.global_batch=24"),
        arguments("annealed", *ANNEALED, "train.stop_at_step=7"),
        arguments("annealed", *ANNEALED),
    ]
    refused = ConfigError.exit_code
    assert train_many(folder, plan) == [0, 0, refused, 0, refused, 0, 0, 0]
    return folder


def rates(run: Path) -> list[float]:
    return [record["lr"] for record in metrics(run)]


def lines(run: Path, *, start: str) -> list[str]:
    """Return the distinct lines of rank 0's log that contain `start`, cut to begin with it."""
    log = RunFolder(run).rank_log(0).read_text().splitlines()
    return list(dict.fromkeys(line[line.index(start) :] for line in log if start in line))


def test_wsd_may_be_extended_until_it_has_decayed(runs: Path) -> None:
    """At step 4 the decay was about to begin; with more steps it begins later. At step 8 the rate has decayed."""
    falling = PEAK * (1 - 0.5**0.5)
    assert rates(runs / "wsd") == [PEAK / 2, *[PEAK] * 5, pytest.approx(falling, rel=1e-12), 0.0]
    (refused,) = lines(runs / "wsd", start="ConfigError")
    says = "learning rate 0.003 for step 9: the checkpoint's settings give 0, after 0 in step 8"
    assert refused.startswith(f"ConfigError: {says}. ")


def test_extending_a_cosine_run_is_refused_unless_a_jump_is_allowed(runs: Path) -> None:
    (refused,) = lines(runs / "cosine", start="ConfigError")
    # As fractions of the peak: step 5 has (1 + cos 120°) / 2 with the old settings and (1 + cos 72°) / 2 with the new
    # ones (2 of 3 and 2 of 5 decay steps done); step 4 had (1 + cos 60°) / 2.
    says = "learning rate 0.00196353 for step 5: the checkpoint's settings give 0.00075, after 0.00225 in step 4"
    fix = "Restore optimizer.lr, schedule, stages and train.steps, or set schedule.allow_jump=true."
    assert refused == f"ConfigError: {says}. {fix}"
    assert lines(runs / "cosine", start="learning rate")[-1] == f"{says} (schedule.allow_jump)"
    found = rates(runs / "cosine")
    assert len(found) == 8
    assert found[3:5] == pytest.approx([0.00225, 0.00196353], rel=1e-5)
    assert found[-1] == 0.0


def test_settings_that_a_resume_changes_are_said_and_recorded(runs: Path) -> None:
    run = RunFolder(runs / "cosine")
    *_, started = [event for event in read_records(run.events) if event["event"] == "started"]
    assert started["changed_settings"] == {"schedule.allow_jump": [False, True], "stage.global_batch": [8, 24]}
    assert started["learning_rate_jump"].startswith("learning rate 0.00196353 for step 5")
    (line,) = lines(run.root, start="settings changed since then: ")
    assert line.endswith("schedule.allow_jump False -> True, stage.global_batch 8 -> 24")
    # Four steps of 256 tokens, then four of three times as many.
    assert [record["tokens_seen"] for record in metrics(run.root)] == [256, 512, 768, 1024, 1792, 2560, 3328, 4096]
    trainer = json.loads((run.checkpoints / "step_00000008" / "trainer.json").read_text())
    assert trainer["tokens_seen"] == 4096
    assert load_run_config(str(run.config)).num_lanes == 64  # by default, this batch has 72


def test_a_stop_within_an_annealing_stage_keeps_the_rates_by_tokens(runs: Path) -> None:
    run = load_run_config(str(RunFolder(runs / "annealed").config))
    stages = run_stages(run)
    found = rates(runs / "annealed")
    assert found == [learning_rate(step, stages, PEAK, run.schedule) for step in range(9)]
    # The last stage has four steps of 256 tokens and lowers the rate from the peak to half of it.
    falling = [PEAK * share for share in (0.875, 0.75, 0.625, 0.5)]
    assert found == pytest.approx([PEAK / 2, *[PEAK] * 4, *falling], rel=1e-12)
    trainer = (RunFolder(runs / "annealed").checkpoints / "step_00000007" / "trainer.json").read_text()
    assert [json.loads(trainer)[name] for name in ("lr_of_last_step", "lr_of_next_step")] == found[6:8]
