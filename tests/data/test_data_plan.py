"""Tests for lanes: every token appears once per epoch with both packers, and a lane resumes from any cursor."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.data.corpus_maker import SpanTokenizer, assert_same, document_tokens, open_stream, write_corpus
from tests.data.tokens.text_corpora import write_text_corpus
from z2all_ds.base.errors import DataError
from z2all_ds.corpus.manifest import load_manifest, write_manifest
from z2all_ds.data import StageSpec, StreamSpec, data_plan, documents
from z2all_ds.data.data_plan import DataPlan, Lane
from z2all_ds.data.documents import DocumentSpan, mixture_sizes
from z2all_ds.data.even_order import TokenOrder
from z2all_ds.data.packing import SMALLEST_PART, Sample, padding_of
from z2all_ds.data.state import merge_states


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
        state = lane.cursors()


class ByteTokenizer(SpanTokenizer):
    """A tokenizer with one token per byte."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]


VERY_DIFFERENT = {
    "many": np.random.default_rng(4).lognormal(4, 1.3, 3000),
    "some are longer than a part": np.minimum((np.random.default_rng(1).pareto(1.0, 300) + 1) * 150, 20_000),
    "half as many as lanes": np.random.default_rng(4).lognormal(9, 1.3, 8),
}


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
@pytest.mark.parametrize("name", list(VERY_DIFFERENT))
def test_after_three_epochs_of_tokens_every_document_was_read_three_times(
    tmp_path: Path, name: str, packing: str
) -> None:
    """Up to the seam of each lane, with very different lengths."""
    lengths = VERY_DIFFERENT[name].astype(int)
    corpus = write_text_corpus(tmp_path, {"web": [["x" * length for length in lengths]]})
    spec = StreamSpec(corpus, [StageSpec(64)], 3, 16, packing)
    plan, sizes = DataPlan.open(spec, ByteTokenizer()), lengths + 1
    lanes = [lane_of(plan, number) for number in range(16)]
    read, padding, k = np.zeros(len(lengths)), 0, 0
    for epochs in (1, 2, 3):
        while k * 64 - padding < epochs * sizes.sum():
            sample, pieces = with_pieces(lanes[k % 16], k, plan)
            for piece in pieces:
                read[piece.document_index] += piece.end - piece.start
            padding, k = padding + sample.num_padding, k + 1
        assert np.maximum(epochs * sizes - read, 0).sum() / sizes.sum() < 0.01
    assert (read >= 2 * sizes).all()
    assert (read <= 4 * sizes).all()


@pytest.mark.parametrize("stages", [(StageSpec(64),), (StageSpec(32, samples=6000), StageSpec(64))])
def test_padding_does_not_accumulate_over_the_epochs(tmp_path: Path, stages: tuple[StageSpec, ...]) -> None:
    """Lanes take equally many samples, so those with more padding would fall behind (by 2.2 % after 20 epochs)."""
    lengths = np.random.default_rng(7).lognormal(3.6, 1.0, 800).astype(int)
    corpus = write_text_corpus(tmp_path, {"web": [["x" * length for length in lengths]]})
    plan = DataPlan.open(StreamSpec(corpus, stages, 3, 16, "best_fit"), ByteTokenizer())
    lanes, sizes = [lane_of(plan, number) for number in range(16)], lengths + 1
    read, taken, k = np.zeros(len(lengths)), 0, 0
    while taken < 20 * sizes.sum():
        _, pieces = with_pieces(lanes[k % 16], k, plan)
        for piece in pieces:
            read[piece.document_index] += piece.end - piece.start
            taken += piece.end - piece.start
        k += 1
    assert np.maximum(20 * sizes - read, 0).sum() / sizes.sum() < 0.01


def test_a_change_of_the_stages_does_not_move_what_was_read(tmp_path: Path) -> None:
    """Parts depend on the padding of past epochs, hence on the lengths that were in use then."""
    lengths = [length % 41 for length in range(0, 6000, 7)]
    corpus = write_corpus(tmp_path, {"web": lengths})
    before = plan_of(corpus, sequence_length=64, packing="best_fit")
    lanes = {number: lane_of(before, number) for number in range(12)}
    read, total, k = Counter[int](), sum(lengths) + len(lengths), 0
    while read.total() < 2.5 * total or k % 12:
        for piece in with_pieces(lanes[k % 12], k, before)[1]:
            read[piece.document_index] += piece.end - piece.start
        k += 1
    parts = [before.state_at(k, {number: lane.cursors()}) for number, lane in lanes.items()]
    state = merge_states([*parts])
    assert state["padding_lengths"] == {"web": [64, 64, 64]}
    after, cursors = plan_of(corpus, sequence_length=16, packing="best_fit").resumed(state, range(12), True)
    assert after.orders[0].cuts(2) == before.orders[0].cuts(2)  # type: ignore[attr-defined]
    for number, cursor in cursors.items():
        lane = Lane(after, number, cursor)
        while (made := with_pieces(lane, k, after)[1])[0].epoch < 3:
            for piece in made:
                read[piece.document_index] += (piece.end - piece.start) * (piece.epoch < 3)
    # Groups that began before the end of the epoch are the only ones that may be missing.
    assert all(read[document] <= 3 * (length + 1) for document, length in enumerate(lengths))
    assert read.total() > 2.99 * total
    assert after.state_at(k, {0: [[*cursors[0][0]]]})["padding_lengths"]["web"][:3] == [64, 64, 64]


@given(
    lengths=st.lists(st.integers(0, 60), min_size=12, max_size=150),
    num_lanes=st.integers(1, 4),
    sequence_length=st.integers(1, 12),
)
@settings(deadline=None)
def test_the_padding_of_a_part_is_known_before_it_is_packed(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], num_lanes: int, sequence_length: int
) -> None:
    corpus = write_corpus(tmp_path_factory.mktemp("padding"), {"web": lengths})
    plan = plan_of(corpus, sequence_length=sequence_length, num_lanes=num_lanes, packing="best_fit")
    order = plan.orders[0]
    assert isinstance(order, TokenOrder)
    parts = order._parts(0)
    assume(min(part.sum() for part in parts) >= SMALLEST_PART * sequence_length)
    order.cuts(1)
    for lane, part in enumerate(parts):
        reading, padding = lane_of(plan, lane), 0
        while (made := with_pieces(reading, 0, plan))[1][0].epoch == 0:
            padding += made[0].num_padding
        assert padding == padding_of(part, sequence_length)
        assert padding == order._padding_before(1)[lane + 1] - order._padding_before(1)[lane]


def test_only_a_full_group_asks_for_the_rest_of_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than reading a short document."""
    left_in_part = create_autospec(TokenOrder.left_in_part, side_effect=TokenOrder.left_in_part)
    monkeypatch.setattr(TokenOrder, "left_in_part", left_in_part)
    plan = plan_of(write_corpus(tmp_path, {"web": [3] * 2000}, 500), num_lanes=1, packing="best_fit")
    samples_of(plan, 64)
    assert left_in_part.call_count == 1


def test_best_fit_divides_the_same_documents_after_a_change_of_later_stages(tmp_path: Path) -> None:
    """A run continues with the longest sample that it began with."""
    corpus = write_corpus(tmp_path, {"web": [300, 5, 170, 40] * 40})
    longer = [StageSpec(16, samples=600), StageSpec(64)]
    begun = open_stream(corpus, stages=[StageSpec(16, samples=600), StageSpec(32)], packing="best_fit")
    samples = iter(begun)
    for _ in range(300):
        next(samples)
    resumed = open_stream(corpus, stages=longer, packing="best_fit")
    resumed.load_state_dict(begun.state_dict())
    for sample, expected in islice(zip(resumed, samples, strict=False), 300):
        assert_same(sample, expected)
    assert resumed.state_dict()["longest_sample"] == 32
    other = iter(open_stream(corpus, stages=longer, packing="best_fit"))
    again = iter(open_stream(corpus, stages=[StageSpec(16, samples=600), StageSpec(32)], packing="best_fit"))
    assert any(not np.array_equal(next(other)["input_ids"], next(again)["input_ids"]) for _ in range(600))


def test_invalid_cursors_are_reported(tmp_path: Path) -> None:
    plan = plan_of(write_corpus(tmp_path, {"web": [5] * 40}, 100), num_lanes=1)
    stage = plan.schedule.stage_of(0)
    with pytest.raises(DataError, match=r"position 5 in a block of domain 'web': the block has 5 documents"):
        Lane(plan, 0, [[0, 5, 0]]).next_sample(0, stage)
    with pytest.raises(DataError, match=r"document \d+: it had more than 10000 tokens and now has fewer"):
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


def test_text_that_is_read_less_evenly_than_its_tokens_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not tiny text, of which tokens are read in strides, too."""
    corpus = write_corpus(tmp_path / "text", {"books": [5] * 3, "code": [5] * 40, "web": [5] * 90})
    plan = plan_of(corpus)
    assert plan.describe_orders() == []
    monkeypatch.setattr(data_plan, "COUNTED_BYTES", 6 << 10)
    line = "its documents are read less evenly, as it has more than 6.0 KiB of text; to avoid that, tokenize it before"
    for limit, kind in ((1 << 20, "even"), (0, "strided")):
        monkeypatch.setattr(data_plan, "EVEN_ORDER_BYTES", limit)
        plan = plan_of(corpus)
        assert [order.kind for order in plan.orders] == ["strided", "tokens", kind]
        (named,) = plan.describe_orders()
        assert named.startswith(f"domain web: {line}")
    tokens = replace(plan, domains=[SimpleNamespace(**vars(domain) | {"num_tokens": 1}) for domain in plan.domains])
    assert tokens.describe_orders() == []


def test_sizes_are_tokens_where_known_then_text_bytes_then_bytes_of_shards() -> None:
    def sizes(**changes: int | None) -> dict[str, int]:
        one: dict[str, Any] = {"num_tokens": 1, "text_bytes": 2, "num_bytes": 3}
        return mixture_sizes({"a": SimpleNamespace(**one), "b": SimpleNamespace(**one | changes)})

    assert sizes(num_tokens=10) == {"a": 1, "b": 10}
    assert sizes(num_tokens=None, text_bytes=20) == {"a": 2, "b": 20}
    assert sizes(num_tokens=None, text_bytes=None, num_bytes=30) == {"a": 3, "b": 30}


def test_a_run_keeps_the_shares_that_it_began_with(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, {"books": [5] * 10, "web": [5] * 30})
    before = open_stream(corpus)  # by the bytes of the shards, as the manifest has no other sizes
    next(iter(before))
    state, shares = before.state_dict(), before.plan.schedule.stages[0].shares
    manifest = load_manifest(corpus)
    sizes = {"books": 90, "web": 10}
    counted = tuple(replace(shard, text_bytes=sizes[shard.domain]) for shard in manifest.shards)
    write_manifest(corpus, replace(manifest, shards=counted))
    fresh = open_stream(corpus)
    assert fresh.plan.schedule.stages[0].shares != shares
    assert fresh.plan.describe_shares()[0].startswith("shares of tokens: books ")
    older = {key: value for key, value in state.items() if key not in ("sizes", "begin_of_text")}
    for saved in (state, older):
        resumed = open_stream(corpus)
        resumed.load_state_dict(saved)  # type: ignore[arg-type]
        assert resumed.plan.schedule.stages[0].shares == shares
        assert resumed.state_dict()["sizes"] == state["sizes"]
