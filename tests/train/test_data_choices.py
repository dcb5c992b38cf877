"""Data settings: token shards and workers change no bit of the training; skips and packing change it as specified."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.command import one_line, z2all
from tests.helpers.recomputed import loss_of
from tests.helpers.training import losses, metrics, run_arguments, train_many
from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import DataError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.corpus.adopt import adopt_corpus
from z2all_ds.corpus.executors import Executor
from z2all_ds.data import PackedStream
from z2all_ds.data.run_spec import stream_spec
from z2all_ds.data.tokens.tokenizing import tokenize_corpus
from z2all_ds.data.trace import drop_states_after, keep_state, trace_run
from z2all_ds.export.to_hf import export_checkpoint
from z2all_ds.tokenizer import load_tokenizer

pytestmark = pytest.mark.extended

SKIP = "data.skip_samples=[[24, 40], [60, 64]]"
"""The samples of two whole steps after the third, then those of half a step."""
SAMPLES_PER_STEP, STEPS = 8, 12


def with_bad_records(corpus: Path, folder: Path) -> Path:
    """Adopt a copy of a corpus in which `code` has short records, and every third one has no text."""
    folder.mkdir()
    for shard in corpus.glob("*.jsonl"):
        lines = shard.read_bytes().splitlines()
        if shard.name.startswith("code"):
            texts = [part for line in lines for part in json.loads(line)["content"].splitlines() if part]
            lines = [json.dumps({"content": text}).encode() for text in texts]
            lines[::3] = [b'{"content": null}'] * len(lines[::3])
        (folder / shard.name).write_bytes(b"".join(line + b"\n" for line in lines))
    adopt_corpus(folder, executor=Executor(1), on_error="skip")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("choices")
    tokens = folder / "tokens"
    tokenize_corpus(small_corpus, small_tokenizer, tokens, workers=1)

    def arguments(run: str, *overrides: str, corpus: Path = small_corpus) -> list[str]:
        # Without weights, shares are by tokens where these are known, and by bytes of text elsewhere.
        weights = "data.weights={code: 2, en: 1, zh: 1}"
        return run_arguments(folder / run, corpus, small_tokenizer, "deepspeed=zero2", weights, *overrides)

    all_kept = ("checkpoint.every_steps=1", "checkpoint.keep_last=20")
    plan = [
        arguments("plain"),
        arguments("bad_records", "data.on_bad_record=skip", corpus=with_bad_records(small_corpus, folder / "bad")),
        arguments("tokens", corpus=tokens),
        arguments("became_tokens", "train.stop_at_step=5"),
        arguments("became_tokens", corpus=tokens),
        arguments("workers", "data.num_workers=2", corpus=tokens),
        arguments("skipped", SKIP, *all_kept),
        arguments("skipped_before", SKIP, "train.stop_at_step=2"),
        arguments("skipped_before"),
        arguments("skipped_between", SKIP, "train.stop_at_step=4"),
        arguments("skipped_between"),
        arguments("skipped_late", "train.stop_at_step=4"),
        arguments("skipped_late", "data.skip_samples=[[16, 40]]"),
        arguments("best_fit", "data.packing=best_fit"),
        arguments("best_fit_stopped", "data.packing=best_fit", "train.stop_at_step=7"),
        arguments("best_fit_stopped"),  # refused: the packing differs
        arguments("best_fit_stopped", "data.packing=best_fit", "data.num_workers=1"),
    ]
    assert train_many(folder, plan) == [0] * 15 + [DataError.exit_code, 0]
    return folder


def data_state(run: Path, step: int = STEPS) -> Any:
    return json.loads((run / "checkpoints" / f"step_{step:08d}" / "data_state.json").read_text())


@pytest.mark.parametrize("run", ["tokens", "became_tokens", "workers"])
def test_token_shards_and_workers_change_no_bit(run: str, runs: Path) -> None:
    assert losses(runs / run) == losses(runs / "plain")
    assert {**data_state(runs / run), "sizes": {}} == {**data_state(runs / "plain"), "sizes": {}}
    assert (data_state(runs / run)["sizes"] == data_state(runs / "plain")["sizes"]) == (run == "became_tokens")


def test_a_run_on_tokens_can_be_exported(runs: Path) -> None:
    report = export_checkpoint(runs / "tokens")
    assert report.verdict.max_relative_difference <= 1e-4
    assert len(report.verdict.generated) == 3


def test_skipped_records_of_all_ranks_are_in_the_metrics_and_in_the_last_lines(runs: Path) -> None:
    folder = RunFolder(runs / "bad_records")
    config = load_run_config(str(folder.config))
    stream = PackedStream(stream_spec(config), load_tokenizer(config.data.tokenizer))
    assert len(list(islice(stream, STEPS * SAMPLES_PER_STEP))) == STEPS * SAMPLES_PER_STEP
    count = stream.take_bad_records()["code"]
    counted = [record.get("bad_records_of_code", 0) for record in metrics(folder.root)]
    assert sum(counted) == count > STEPS
    assert f"bad records skipped, counted in every epoch: code {count}" in folder.rank_log(0).read_text()
    assert not any("bad_records" in name for record in metrics(runs / "plain") for name in record)


# Skipped samples


def numbered_samples(run: Path, count: int) -> list[dict[str, torch.Tensor]]:
    """Return the first `count` global samples of the run's data without skips."""
    config = load_run_config(str(RunFolder(run).config), ["data.skip_samples=[]"])
    return list(islice(PackedStream(stream_spec(config), load_tokenizer(config.data.tokenizer)), count))


@pytest.mark.parametrize(
    ("step", "numbers"), [(3, range(16, 24)), (4, range(40, 48)), (6, [*range(56, 60), *range(64, 68)])]
)
def test_a_step_after_skipped_samples_uses_the_samples_after_them(step: int, numbers: range, runs: Path) -> None:
    run = runs / "skipped"
    samples = numbered_samples(run, 100)
    checkpoint = run / "checkpoints" / f"step_{step - 1:08d}"
    here = loss_of(load_run_config(str(RunFolder(run).config)), checkpoint, [samples[number] for number in numbers])
    assert losses(run)[step - 1] == pytest.approx(here, rel=1e-6)


def test_steps_before_skipped_samples_are_unchanged(runs: Path) -> None:
    plain, skipped = losses(runs / "plain"), losses(runs / "skipped")
    assert skipped[:3] == plain[:3]
    assert skipped[3] != plain[3]
    assert data_state(runs / "skipped", step=3)["position"] == 24
    # At the end of a step, the skipped range after it is not consumed yet.
    assert data_state(runs / "skipped", step=4)["position"] == 48
    assert data_state(runs / "skipped")["position"] == STEPS * SAMPLES_PER_STEP + 16 + 4
    assert data_state(runs / "plain")["position"] == STEPS * SAMPLES_PER_STEP


@pytest.mark.parametrize("run", ["skipped_before", "skipped_between"])
def test_a_skip_is_kept_by_a_resume_without_the_setting(run: str, runs: Path) -> None:
    assert losses(runs / run) == losses(runs / "skipped")
    assert data_state(runs / run) == data_state(runs / "skipped")
    assert data_state(runs / run)["skip"] == [[24, 40], [60, 64]]


def test_a_skip_added_at_a_resume_applies_from_there(runs: Path) -> None:
    run = runs / "skipped_late"
    assert losses(run)[:4] == losses(runs / "plain")[:4]
    assert data_state(run)["skip"] == [[32, 40]]
    assert data_state(run)["position"] == STEPS * SAMPLES_PER_STEP + 8
    here = loss_of(
        load_run_config(str(RunFolder(run).config)),
        run / "checkpoints" / "step_00000004",
        numbered_samples(run, 48)[40:],
    )
    assert losses(run)[4] == pytest.approx(here, rel=1e-6)


# Traces


@pytest.mark.parametrize(
    ("run", "step", "numbers"),
    [("plain", 7, range(48, 56)), ("skipped", 4, range(40, 48)), ("skipped", 6, [*range(56, 60), *range(64, 68)])],
)
def test_a_step_is_traced_to_its_documents(run: str, step: int, numbers: range, runs: Path) -> None:
    """The trace starts from the nearest earlier state, includes the skips, and has the tokens of the samples."""
    samples = numbered_samples(runs / run, 100)
    traces = trace_run(runs / run, [3], step)
    assert [trace.sample for trace in traces] == [3, *numbers]
    for trace in traces:
        assert trace.token_ids == samples[trace.sample]["input_ids"].tolist()
    if run == "skipped":
        assert traces[1].from_sample == data_state(runs / run, step - 1)["position"]


def test_data_states_outlive_their_checkpoints(runs: Path) -> None:
    """The state of every checkpoint is kept; `drop_states_after` removes those of later steps."""
    kept = sorted(path.name for path in RunFolder(runs / "skipped").data_states.iterdir())
    assert kept == [f"step_{step:08d}.json" for step in range(1, STEPS + 1)]
    drop_states_after(RunFolder(runs / "skipped"), 5)
    assert len(list(RunFolder(runs / "skipped").data_states.iterdir())) == 5


def test_a_data_state_that_cannot_be_written_logs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "data_states").write_text("a file where the folder should be")
    said: list[str] = []
    keep_state(RunFolder(tmp_path), 5, {"position": 40}, said.append)
    assert said == ["the data state of step 5 is not kept for traces (File exists)"]


def test_the_trace_command_names_shard_record_and_domain(runs: Path, small_corpus: Path) -> None:
    answer = z2all("corpus", "trace", runs / "plain", "--sample", "5", "--json", cwd=runs)
    assert answer.returncode == 0, answer.stderr
    (trace,) = json.loads(answer.stdout)
    for piece in trace["pieces"]:
        record = json.loads((small_corpus / piece["shard"]).read_bytes().splitlines()[piece["record"]])
        assert record["content"]
        assert piece["shard"].startswith(trace["domain"])
    traced = z2all("corpus", "trace", runs / "plain", "--step", "1", cwd=runs)
    assert len([line for line in traced.stdout.splitlines() if line.startswith("sample ")]) == SAMPLES_PER_STEP
    assert f"{trace['pieces'][0]['shard']}, record {trace['pieces'][0]['record']}, epoch 0" in traced.stdout


def test_the_trace_command_shows_how_often_each_domain_was_read(runs: Path) -> None:
    """The metrics have it, too: of the lanes of rank 0, which are half of them here."""
    answer = z2all("corpus", "trace", runs / "plain", "--json", cwd=runs)
    assert answer.returncode == 0, answer.stderr
    last = metrics(runs / "plain")[-1]
    for one in json.loads(answer.stdout):
        assert 0 <= one["least"] <= one["epochs"] <= one["most"] < one["least"] + 1
        assert last[f"epochs_of_{one['domain']}"] == pytest.approx(one["epochs"], abs=0.5)
    assert any(one["epochs"] > 0 for one in json.loads(answer.stdout))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plain", "--step", "13"], "step 13: the run has steps 1 to 12"),
        (["plain", "--sample", "99999999999999999999"], "sample 99999999999999999999: the run has samples 0 to "),
        (["plain", "--sample", "-2"], "sample -2: samples are numbered from 0"),
        (["nowhere", "--sample", "2"], "it has no run.yaml"),
    ],
)
def test_invalid_trace_requests_are_refused(arguments: list[str], words: str, runs: Path) -> None:
    assert words in one_line(z2all("corpus", "trace", *arguments, cwd=runs), 2)


# Packing


def test_best_fit_packing_trains_and_resumes_bit_for_bit(runs: Path) -> None:
    whole = losses(runs / "best_fit")
    assert whole != losses(runs / "plain")
    assert whole[-1] < whole[0] - 0.05
    assert losses(runs / "best_fit_stopped") == whole
    assert data_state(runs / "best_fit_stopped") == data_state(runs / "best_fit")


def test_a_resume_with_another_packing_is_refused(runs: Path) -> None:
    lines = RunFolder(runs / "best_fit_stopped").rank_log(0).read_text().splitlines()
    (refused,) = {line for line in lines if line.startswith("DataError")}
    assert "packing was best_fit and is cut" in refused
