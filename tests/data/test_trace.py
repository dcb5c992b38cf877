"""Tests for tracing: the documents of a sample are found from the start or from any earlier state."""

import json
import os
from itertools import islice
from pathlib import Path

import pytest
import torch

from tests.data.corpus_maker import SpanTokenizer, open_stream, small_corpus
from z2all_ds.base.config import dump_yaml, load_run_config
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.data import PackedStream, StageSpec, trace
from z2all_ds.data.run_spec import stream_spec
from z2all_ds.data.state import StreamState
from z2all_ds.data.trace import (
    _states,
    coverage_of_run,
    drop_states_after,
    keep_state,
    trace_run,
    trace_sample,
    trained_samples,
)

STAGES = (StageSpec(16, samples=96), StageSpec(24, {"books": 1.0, "web": 1.0}))


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_traced_tokens_are_the_tokens_of_the_sample(tmp_path: Path, packing: str) -> None:
    stream = open_stream(small_corpus(tmp_path), stages=STAGES, packing=packing, skip=[(24, 36)])
    samples, states, by_number = iter(stream), [], {}
    for k in [*range(24), *range(36, 200)]:
        by_number[k] = next(samples)
        if stream.position % 60 == 0:
            states.append(stream.state_dict())
    plan = stream.plan
    for k in (0, 11, 23, 36, 60, 107, 108, 150, 199):
        for known in ((), states):
            trace = trace_sample(plan, k, known)
            ids = by_number[k]["input_ids"].tolist()
            assert trace.token_ids == ids[: len(trace.token_ids)]
            assert plan.domains[int(by_number[k]["domain_ids"][0])].name == trace.domain
            assert trace.lane == k % 12
            assert trace.from_sample == max([0, *(s["position"] for s in known if s["position"] <= k)])
            assert len(trace.token_ids) == sum(piece.end - piece.start for piece in trace.pieces)
            assert set(ids[len(trace.token_ids) :]) <= {0}  # padding
    assert [trace_sample(plan, k).skipped for k in (23, 24, 35, 36)] == [False, True, True, False]
    assert trace_sample(plan, 110).stage == "1"


def test_each_piece_has_the_shard_and_record_of_its_document(tmp_path: Path) -> None:
    """The tokens identify their document, and each shard has up to seven documents."""
    plan = open_stream(small_corpus(tmp_path)).plan
    first_of_domain = {"books": 0, "code": 5, "web": 45}
    for k in range(60):
        trace = trace_sample(plan, k)
        at = 0
        for piece in trace.pieces:
            text = [t for t in trace.token_ids[at : at + piece.end - piece.start] if t]
            at += piece.end - piece.start
            number = first_of_domain[trace.domain] + piece.document_index
            assert {token // 1000 for token in text} <= {number}
            assert piece.record == piece.document_index % 7
            assert piece.shard.startswith(f"{trace.domain}-")


def test_the_reported_progress_adds_up_to_the_sample_number(tmp_path: Path) -> None:
    plan = open_stream(small_corpus(tmp_path)).plan
    passed: list[int] = []
    trace_sample(plan, 120, (), passed.append)
    assert sum(passed) == 120


def test_a_negative_sample_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sample -1: samples are numbered from 0"):
        trace_sample(open_stream(small_corpus(tmp_path)).plan, -1)


def test_the_samples_of_a_step_are_the_recorded_ones_also_if_the_batch_has_changed(tmp_path: Path) -> None:
    folder, run = RunFolder(tmp_path), load_run_config(None, ["train.steps=4", "train.global_batch=8"])
    plan = open_stream(small_corpus(tmp_path / "corpus"), skip=[(12, 14)]).plan
    positions = {1: 8, 2: 18, 3: 20}  # a batch of 8, then of 2 samples; two are skipped in the second step
    lines = [json.dumps({"step": step, "data_position": position}) for step, position in positions.items()]
    folder.metrics.write_text("\n".join([*lines, "damaged", ""]))
    assert trained_samples(folder, run, plan, 1) == list(range(8))
    assert trained_samples(folder, run, plan, 2) == [8, 9, 10, 11, 14, 15, 16, 17]
    assert trained_samples(folder, run, plan, 3) == [18, 19]
    assert len(trained_samples(folder, run, plan, 4)) == 8  # not recorded yet: as the config says


def test_samples_of_a_run_that_continued_with_other_weights_are_those_that_it_read_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, corpus = RunFolder(tmp_path / "run"), small_corpus(tmp_path / "corpus")
    monkeypatch.setattr(trace, "open_tokenizer", lambda run: SpanTokenizer())
    samples: list[dict[str, torch.Tensor]] = []

    def read(count: int, weights: str, before: StreamState | None = None) -> StreamState:
        """Read samples of the run with these weights, and return the state."""
        values = [f"data.corpus={corpus}", "data.num_lanes=12", f"data.weights={weights}", "train.sequence_length=16"]
        run = load_run_config(None, [*values, f"data.allow_change={'true' if before else 'false'}"])
        folder.root.mkdir(exist_ok=True)
        folder.config.write_text(dump_yaml(run))
        stream = PackedStream(stream_spec(run), SpanTokenizer())
        if before:
            stream.load_state_dict(before, allow_data_change=True)
        samples.extend(islice(stream, count))
        return stream.state_dict()

    def trace_all(first: int, end: int) -> None:
        for found in trace_run(folder.root, range(first, end)):
            assert found.token_ids == samples[found.sample]["input_ids"].tolist()

    first = read(20, "{books: 4, web: 1}")
    keep_state(folder, 1, dict(first), pytest.fail)
    trace_all(0, 20)
    second = read(15, "{books: 1, web: 4}", first)
    trace_all(20, 35)
    keep_state(folder, 2, dict(second), pytest.fail)
    trace_all(20, 35)
    refused = r"sample 3: the data has changed since it was read: shares was .* and is .*the run\.yaml and the corpus"
    with pytest.raises(DataError, match=refused):
        trace_run(folder.root, [3])
    assert [domain.epochs > 0 for domain in coverage_of_run(folder.root)] == [True, True]


def test_files_with_other_names_next_to_the_data_states_are_left_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (4, 8):
        keep_state(folder, step, {"position": step}, pytest.fail)
    notes = [folder.data_states / name for name in ("step_notes.json", "step_9.json", "step_00000009.json.bak")]
    for path in notes:
        path.write_text("{}")
    drop_states_after(folder, 4)
    assert folder.data_state_files() == {4: folder.data_states / "step_00000004.json"}
    assert all(path.exists() for path in notes)


def test_a_pipe_in_place_of_a_data_state_is_one_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.data_states.mkdir()
    os.mkfifo(folder.data_states / "step_00000003.json")
    with pytest.raises(DataError, match=r"step_00000003\.json"):
        _states(folder)
