"""Tests for lanes: every token appears once per epoch with both packers, and a lane resumes from any cursor."""

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpus_maker import SpanTokenizer, document_tokens, open_stream, write_corpus
from z2all_ds.base.errors import DataError
from z2all_ds.data import StageSpec, documents
from z2all_ds.data.data_plan import DataPlan, Lane
from z2all_ds.data.documents import DocumentSpan
from z2all_ds.data.packing import Sample


def plan_of(corpus: Path, **spec: object) -> DataPlan:
    return open_stream(corpus, **spec).plan  # type: ignore[arg-type]


def lane_of(plan: DataPlan, number: int) -> Lane:
    return Lane(plan, number, plan.fresh_lanes([number])[number])


def samples_of(plan: DataPlan, count: int) -> list[tuple[Sample, list[DocumentSpan]]]:
    """Return the first `count` global samples with their document spans."""
    lanes = [lane_of(plan, number) for number in range(plan.spec.num_lanes)]
    return [with_pieces(lanes[k % len(lanes)], k, plan) for k in range(count)]


def with_pieces(lane: Lane, sample: int, plan: DataPlan) -> tuple[Sample, list[DocumentSpan]]:
    pieces: list[DocumentSpan] = []
    return lane.next_sample(sample, plan.schedule.stage_of(sample), pieces), pieces


lengths = st.lists(st.integers(0, 30), min_size=1, max_size=120)


@given(
    lengths=lengths,
    num_lanes=st.integers(1, 9),
    sequence_length=st.integers(1, 24),
    packing=st.sampled_from(["cut", "best_fit"]),
)
def test_every_token_is_used_once_per_epoch(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], num_lanes: int, sequence_length: int, packing: str
) -> None:
    """The pieces of a document in an epoch cover it exactly, without overlap, and contain its tokens."""
    corpus = write_corpus(tmp_path_factory.mktemp("c"), {"web": lengths}, 11)
    plan = plan_of(corpus, num_lanes=num_lanes, sequence_length=sequence_length, packing=packing)
    # Enough samples for two epochs of the slowest lane.
    tokens_of_an_epoch = sum(lengths) + len(lengths)
    most = (2 * tokens_of_an_epoch + 66 * sequence_length * num_lanes) // sequence_length + 2
    covered: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for sample, pieces in samples_of(plan, most * num_lanes):
        at = 0
        assert sum(sample.piece_lengths) == sequence_length
        for piece in pieces:
            document = document_tokens(piece.document_index, lengths[piece.document_index])
            size = piece.end - piece.start
            assert sample.tokens[at : at + size].tolist() == document[piece.start : piece.end]
            at += size
            covered[piece.epoch, piece.document_index].append((piece.start, piece.end))
        assert at == sequence_length - sample.num_padding
        if sample.continues:
            assert sample.tokens[-1] == document[pieces[-1].end]
    for (epoch, document_index), parts in covered.items():
        parts.sort()
        gaps = [right[0] - left[1] for left, right in pairwise(parts)]
        assert min(gaps, default=0) >= 0, (epoch, parts)
        if epoch == 0:
            assert (parts[0][0], max(gaps, default=0), parts[-1][1]) == (0, 0, lengths[document_index] + 1)
    assert {document for epoch, document in covered if epoch == 0} == set(range(len(lengths)))


@settings(max_examples=40, deadline=None)
@given(lengths=lengths, sequence_length=st.integers(4, 24))
def test_best_fit_cuts_only_documents_longer_than_a_sample(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], sequence_length: int
) -> None:
    corpus = write_corpus(tmp_path_factory.mktemp("c"), {"web": lengths}, 50)
    plan = plan_of(corpus, num_lanes=2, sequence_length=sequence_length, packing="best_fit")
    for _, pieces in samples_of(plan, 100):
        for piece in pieces:
            length = lengths[piece.document_index] + 1
            if length <= sequence_length:
                assert (piece.start, piece.end) == (0, length)
            else:
                assert piece.start % sequence_length == 0


def test_cut_adds_no_padding_and_best_fit_adds_little(tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    lengths = np.minimum(draw.lognormal(4.5, 1.2, 2000), 999).astype(int).tolist()  # mostly short, some very long
    corpus = write_corpus(tmp_path, {"web": lengths}, 500)
    padding = {}
    for packing in ("cut", "best_fit"):
        samples = samples_of(plan_of(corpus, num_lanes=4, sequence_length=256, packing=packing), 400)
        padding[packing] = sum(sample.num_padding for sample, _ in samples) / (400 * 256)
    assert padding["cut"] == 0
    assert padding["best_fit"] < 0.03, padding


@settings(max_examples=60, deadline=None)
@given(
    lengths=lengths,
    packing=st.sampled_from(["cut", "best_fit"]),
    borders=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), max_size=3),
    stops=st.lists(st.integers(1, 25), min_size=1, max_size=6),
)
def test_a_lane_resumes_from_any_cursor_across_a_change_of_sequence_length(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    packing: str,
    borders: list[tuple[int, int]],
    stops: list[int],
) -> None:
    """A lane recreated from its cursors returns the same samples, even in the middle of a group."""
    corpus = write_corpus(tmp_path_factory.mktemp("c"), {"code": lengths, "web": lengths[::-1]}, 13)
    stages = [*(StageSpec(length, samples=samples) for samples, length in borders), StageSpec(10)]
    plan = plan_of(corpus, num_lanes=1, stages=stages, packing=packing)
    unbroken = samples_of(plan, sum(stops))
    state, number = plan.fresh_lanes([0])[0], 0
    for stop in stops:
        lane = Lane(plan, 0, state)
        for _ in range(stop):
            sample, pieces = with_pieces(lane, number, plan)
            expected, expected_pieces = unbroken[number]
            np.testing.assert_array_equal(sample.tokens, expected.tokens)
            assert sample[1:] == expected[1:]
            assert pieces == expected_pieces
            number += 1
        state = [lane.cursor(domain) for domain in range(2)]


def test_invalid_cursors_are_reported(tmp_path: Path) -> None:
    plan = plan_of(write_corpus(tmp_path, {"web": [5] * 40}, 100), num_lanes=1)
    stage = plan.schedule.stage_of(0)
    with pytest.raises(DataError, match=r"position 5 in a block of domain 'web': the block has 5 documents"):
        Lane(plan, 0, [[0, 5, 0]]).next_sample(0, stage)
    with pytest.raises(DataError, match=r"10000 tokens used of document \d+: the document has 6"):
        Lane(plan, 0, [[0, 0, 10_000]]).next_sample(0, stage)


def test_a_resume_tokenizes_only_the_documents_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume reads the document in which the lane stopped and the following ones, but no earlier document."""
    monkeypatch.setattr(documents, "CHARACTERS_PER_TOKEN", 0)  # one document at a time
    corpus = write_corpus(tmp_path, {"web": [20] * 300}, 50)
    stream = open_stream(corpus, num_lanes=1)
    samples = iter(stream)
    for _ in range(100):
        next(samples)
    state = stream.state_dict()

    class Counting(SpanTokenizer):
        texts = 0

        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            self.texts += len(texts)
            return super().encode_batch(texts)

    tokenizer = Counting()
    resumed = type(stream)(stream.plan.spec, tokenizer)
    resumed.load_state_dict(state)
    assert tokenizer.texts == 0
    expected = next(samples)
    assert next(iter(resumed))["input_ids"].tolist() == expected["input_ids"].tolist()
    assert tokenizer.texts == expected["document_ids"][-1] + 1


@settings(max_examples=30, deadline=None)
@given(lengths=lengths, sequence_length=st.integers(1, 40), run=st.integers(0, 20))
def test_the_number_of_documents_tokenized_together_does_not_change_samples(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], sequence_length: int, run: int
) -> None:
    corpus = write_corpus(tmp_path_factory.mktemp("c"), {"web": lengths}, 9)
    plan = plan_of(corpus, num_lanes=2, sequence_length=sequence_length)
    expected = samples_of(plan, 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "CHARACTERS_PER_TOKEN", run)
        for (sample, pieces), (other, other_pieces) in zip(samples_of(plan, 60), expected, strict=True):
            assert sample.tokens.tolist() == other.tokens.tolist()
            assert (sample[1:], pieces) == (other[1:], other_pieces)
