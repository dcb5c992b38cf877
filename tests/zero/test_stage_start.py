"""Tests of runs with several stages on two real ranks: sequence length, batch, positions and mixture change at the
boundaries."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.recomputed import loss_of
from tests.helpers.training import losses, metrics, run_arguments, train_many
from z2all_ds.base.config import load_run_config
from z2all_ds.base.config.stages import run_stages
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.data import PackedStream
from z2all_ds.data.run_spec import stream_spec
from z2all_ds.export.to_hf import export_checkpoint
from z2all_ds.tokenizer import load_tokenizer
from z2all_ds.track.writer import read_records
from z2all_ds.zero.stage_start import check_stages_past

STAGES = (
    "stages=[{name: short, steps: 5, weights: {code: 1, en: 1}},"
    " {name: long, steps: 4, sequence_length: 64, global_batch: 4, rope_theta: 50000},"
    " {name: anneal, sequence_length: 48, global_batch: 4, rope_theta: 1e6, weights: {zh: 1}}]"
)
"""The micro-batch size changes only at the first boundary."""
SAME = "stages=[{name: a, steps: 5}, {name: b, steps: 1}, {name: c}]"
ONE_DOMAIN = "data.weights={code: 1}"
LARGE_WEIGHTS = "model.initializer_range=0.1"
"""With the usual 0.02, attention is almost uniform at first, so other positions would change the loss only by rounding
errors."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("stages")

    def arguments(run: str, *overrides: str) -> list[str]:
        return run_arguments(folder / run, small_corpus, small_tokenizer, "deepspeed=zero2", LARGE_WEIGHTS, *overrides)

    later = STAGES.replace("steps: 4", "steps: 3").replace("zh: 1", "en: 1")
    plan = [
        arguments("whole", STAGES, "checkpoint.every_steps=1", "checkpoint.keep_last=20"),
        arguments("within", STAGES, "train.stop_at_step=7"),
        arguments("within", STAGES),
        arguments("border", STAGES, "train.stop_at_step=5"),
        arguments("border", STAGES),
        arguments("workers", STAGES, "data.num_workers=2"),
        arguments("zero3", STAGES, "deepspeed=zero3"),
        arguments("large_micro", STAGES, "train.micro_batch=4"),
        arguments("same", SAME, ONE_DOMAIN),
        arguments("plain", ONE_DOMAIN),
        arguments("one", "stages=[{name: all}]", ONE_DOMAIN),
        arguments("moved", STAGES, "train.stop_at_step=6"),
        arguments("moved", STAGES.replace("steps: 5", "steps: 4")),
        arguments("moved", later),
    ]
    codes = train_many(folder, plan)
    assert codes == [0] * 12 + [ConfigError.exit_code, 0]
    return folder


@pytest.mark.extended
def test_token_counts_and_domains_follow_the_stages(runs: Path) -> None:
    tokens = [record["tokens_seen"] for record in metrics(runs / "whole")]
    assert tokens == [
        *(256 * step for step in range(1, 6)),
        *(1280 + 256 * step for step in range(1, 5)),
        *(2304 + 192 * step for step in range(1, 4)),
    ]
    domains = [sorted(name for name in record if name.startswith("loss_of_")) for record in metrics(runs / "whole")]
    assert all(names == ["loss_of_code", "loss_of_en"] for names in domains[:5])
    # The second stage takes its weights from the first one.
    assert {name for names in domains[5:9] for name in names} == {"loss_of_code", "loss_of_en"}
    assert all(names == ["loss_of_zh"] for names in domains[9:])


def stage_events(run: Path) -> list[tuple[Any, ...]]:
    events = [record for record in read_records(run / "events.jsonl") if record["event"] == "stage"]
    return [(event["step"], event["name"], event["sequence_length"]) for event in events]


@pytest.mark.extended
def test_each_stage_is_logged_when_it_begins(runs: Path) -> None:
    log = RunFolder(runs / "whole").rank_log(0).read_text()
    stage_lines = [line.split(maxsplit=1)[1] for line in log.splitlines() if line[8:15] == " stage "]
    assert stage_lines == [
        "stage short: steps 1 to 5, 8 x 32 tokens per step, rope theta 10000",
        "stage long: steps 6 to 9, 4 x 64 tokens per step, rope theta 50000",
        "stage anneal: steps 10 to 12, 4 x 48 tokens per step, rope theta 1e+06",
    ]
    assert stage_events(runs / "whole") == [(0, "short", 32), (5, "long", 64), (9, "anneal", 48)]
    assert stage_events(runs / "within") == [(0, "short", 32), (5, "long", 64), (7, "long", 64), (9, "anneal", 48)]
    assert stage_events(runs / "border") == [(0, "short", 32), (5, "long", 64), (9, "anneal", 48)]
    assert stage_events(runs / "one") == stage_events(runs / "plain") == []


@pytest.mark.extended
@pytest.mark.parametrize("run", ["within", "border", "workers"])
def test_stops_and_data_workers_leave_the_metrics_bit_identical(run: str, runs: Path) -> None:
    for key in ("step", "tokens_seen", "loss", "loss_of_code", "loss_of_en", "loss_of_zh", "lr", "grad_norm"):
        assert [r.get(key) for r in metrics(runs / run)] == [r.get(key) for r in metrics(runs / "whole")], key


@pytest.mark.extended
@pytest.mark.parametrize("run", ["zero3", "large_micro"])
def test_zero3_and_a_larger_micro_batch_give_the_same_losses(run: str, runs: Path) -> None:
    """The order of sums differs: fp32 rounding differences, which grow over 12 steps."""
    assert losses(runs / run) == pytest.approx(losses(runs / "whole"), rel=2e-6)
    norms = [[record["grad_norm"] for record in metrics(runs / name)] for name in (run, "whole")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.extended
def test_stages_without_changes_leave_the_losses_bit_identical(runs: Path) -> None:
    """The runs use one domain: with several, each stage restarts its mixture."""
    assert losses(runs / "same") == losses(runs / "plain") == losses(runs / "one")


def first_step_of_stage(runs: Path, step: int, rope_theta: float) -> float:
    """Recompute the loss of the step after `step` from its checkpoint, with the samples of a one-rank stream."""
    run_folder = RunFolder(runs / "whole")
    run = load_run_config(str(run_folder.config))
    checkpoint = run_folder.checkpoints / f"step_{step:08d}"
    stream = PackedStream(stream_spec(run), load_tokenizer(run.data.tokenizer))
    stream.load_state_dict(json.loads((checkpoint / "data_state.json").read_text()))
    return loss_of(run, checkpoint, list(islice(stream, 4)), rope_theta)


@pytest.mark.extended
@pytest.mark.parametrize(("step", "rope_theta"), [(5, 50000.0), (9, 1e6)])
def test_the_first_step_of_a_stage_uses_its_samples_and_positions(step: int, rope_theta: float, runs: Path) -> None:
    seen = losses(runs / "whole")[step]
    assert first_step_of_stage(runs, step, rope_theta) == pytest.approx(seen, rel=1e-6)
    assert first_step_of_stage(runs, step, 10000.0) != pytest.approx(seen, rel=2e-5)


@pytest.mark.extended
@pytest.mark.parametrize(("step", "rope_theta", "length"), [(5, 10000.0, 32), (6, 50000.0, 64), (12, 1e6, 48)])
def test_an_export_has_the_positions_of_the_stage_of_its_checkpoint(
    step: int, rope_theta: float, length: int, runs: Path
) -> None:
    """Step 5 is the last of its stage. The export compares its logits with those of transformers' own model."""
    report = export_checkpoint(runs / "whole" / "checkpoints" / f"step_{step:08d}")
    config = json.loads((report.folder / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == rope_theta
    assert report.verdict.max_relative_difference <= 1e-4
    card = (report.folder / "README.md").read_text()
    assert f"| sequence length | {length} |" in card
    assert f"| tokens seen | {metrics(runs / 'whole')[step - 1]['tokens_seen']:,} |" in card


@pytest.mark.extended
def test_future_stages_may_be_changed_but_past_stages_may_not(runs: Path) -> None:
    lines = RunFolder(runs / "moved").rank_log(0).read_text().splitlines()
    (refused,) = {line for line in lines if line.startswith("ConfigError")}
    assert "stages: 40 samples in the first 6 steps: the checkpoint of step 6 was made with 44" in refused
    assert losses(runs / "moved")[:8] == losses(runs / "whole")[:8]
    later = metrics(runs / "moved")[8:]
    assert len(later) == 4
    assert all("loss_of_zh" not in record and "loss_of_en" in record for record in later)


def test_skipped_samples_do_not_count_as_seen() -> None:
    run = load_run_config(None, ["train.steps=10", "stages=[{name: a, steps: 4}, {name: b, global_batch: 64}]"])
    stages = run_stages(run)
    state: Any = {"position": 4 * 32 + 64 + 96, "skip": [(32, 64), (100, 164), (1000, 2000)]}
    check_stages_past(stages, 5, state)
    words = "256 samples in the first 6 steps: the checkpoint of step 6 was made with 192"
    with pytest.raises(ConfigError, match=words):
        check_stages_past(stages, 6, state)
