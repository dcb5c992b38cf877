"""Tests for tracing: the documents of a sample are found from the start or from any earlier state."""

from pathlib import Path

import pytest

from tests.data.corpus_maker import open_stream, small_corpus
from z2all_ds.base.errors import ConfigError
from z2all_ds.data import StageSpec
from z2all_ds.data.trace import trace_sample

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
