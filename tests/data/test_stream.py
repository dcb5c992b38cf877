"""The order of samples: the rows of the lanes, every world size, and every way of stopping and going on."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpus_maker import (
    SpanTokenizer,
    as_arrays,
    assert_same,
    document_tokens,
    open_stream,
    small_corpus,
    write_corpus,
)
from z2all_ds.data import BatchLoader, PackedStream, StreamSpec, merge_states
from z2all_ds.data.order import document_at
from z2all_ds.data.packing import NO_TARGET, SAMPLE_COLUMNS
from z2all_ds.data.state import divisors
from z2all_ds.errors import ConfigError

NUM_LANES = 12
UNBROKEN_SAMPLES = 400


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def unbroken(corpus: Path) -> list[dict[str, np.ndarray]]:
    """The global sequence of one rank that never stops."""
    samples = iter(open_stream(corpus))
    return [as_arrays(next(samples)) for _ in range(UNBROKEN_SAMPLES)]


def split_documents(row: list[int]) -> list[list[int]]:
    """The whole documents of a row of tokens; what has no end yet is left out."""
    documents: list[list[int]] = [[]]
    for token in row:
        documents[-1].append(token)
        if token == SpanTokenizer.eot_id:
            documents.append([])
    return documents[:-1]


@pytest.mark.parametrize(("num_documents", "num_lanes"), [(23, 4), (3, 8), (1, 5), (40, 1)])
def test_lanes_hold_the_documents_whole_and_in_order(tmp_path: Path, num_documents: int, num_lanes: int) -> None:
    """Lane l is the documents at positions l, l + L, ... end to end; together they are every document of an epoch."""
    draw = random.Random(num_documents)
    lengths = [draw.randrange(0, 25) for _ in range(num_documents)]
    stream = open_stream(write_corpus(tmp_path, {"web": lengths}, 6), num_lanes=num_lanes, sequence_length=9)
    samples = iter(stream)
    rows: list[list[int]] = [[] for _ in range(num_lanes)]
    for k in range(60 * num_lanes):
        rows[k % num_lanes].extend(next(samples)["input_ids"].tolist())
    numbers_of_first_epoch = []
    for lane, row in enumerate(rows):
        for turn, document in enumerate(split_documents(row)):
            place = document_at(lane + turn * num_lanes, num_documents, 3, "web")
            assert document == document_tokens(place.document_index, lengths[place.document_index])
            if place.epoch == 0:
                numbers_of_first_epoch.append(place.document_index)
    assert sorted(numbers_of_first_epoch) == list(range(num_documents))


def test_batch_rules_hold_in_the_stream(unbroken: list[dict[str, np.ndarray]]) -> None:
    """Labels look over the end of a sample, never over the end of a document; domains belong to their tokens."""
    for lane in range(NUM_LANES):
        samples = unbroken[lane::NUM_LANES]
        row = np.concatenate([sample["input_ids"] for sample in samples])
        labels = np.concatenate([sample["labels"] for sample in samples])
        expected = np.where(row[:-1] == SpanTokenizer.eot_id, NO_TARGET, row[1:])
        np.testing.assert_array_equal(labels[:-1], expected)
    for sample in unbroken:
        assert tuple(sample) == SAMPLE_COLUMNS
        texts = sample["input_ids"] != SpanTokenizer.eot_id
        numbers = sample["input_ids"][texts] // 1000
        np.testing.assert_array_equal(sample["domain_ids"][texts], np.searchsorted([5, 45], numbers, side="right"))
        assert (sample["document_ids"][0], sample["position_ids"][0]) == (0, 0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_world_sizes_give_the_same_sequence(
    corpus: Path, unbroken: list[dict[str, np.ndarray]], world_size: int
) -> None:
    ranks = [iter(open_stream(corpus, rank, world_size)) for rank in range(world_size)]
    for k in range(144):
        assert_same(as_arrays(next(ranks[k % world_size])), unbroken[k])


def run_segment(
    corpus: Path, state: dict | None, world_size: int, micro_batch_size: int, micro_batches: int
) -> tuple[list[dict[str, np.ndarray]], dict]:
    """All ranks of one run, one after the other: the global samples it consumed, in order, and its merged state."""
    per_rank, states = [], []
    for rank in range(world_size):
        with BatchLoader(open_stream(corpus, rank, world_size), micro_batch_size, prefetch_batches=2) as loader:
            if state is not None:
                loader.load_state_dict(state)
            batches = [next(loader) for _ in range(micro_batches)]
            states.append(loader.state_dict())
        per_rank.append([
            {name: column[row].numpy() for name, column in batch.items()}
            for batch in batches for row in range(micro_batch_size)
        ])  # fmt: skip
    in_turn = [sample for samples in zip(*per_rank, strict=True) for sample in samples]
    return in_turn, json.loads(json.dumps(merge_states(states)))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_stops_anywhere_and_goes_on_at_any_shape(
    corpus: Path, unbroken: list[dict[str, np.ndarray]], data: st.DataObject
) -> None:
    """Several resumes, each with its own world size and micro-batch, also with lanes consumed unevenly."""
    state: dict | None = None
    consumed = 0
    for _ in range(data.draw(st.integers(2, 5), label="segments")):
        allowed = divisors(int(np.gcd(consumed, NUM_LANES)))
        world_size = data.draw(st.sampled_from(allowed), label="world_size")
        micro_batch_size = data.draw(st.integers(1, 5), label="micro_batch_size")
        room = (UNBROKEN_SAMPLES - consumed) // (world_size * micro_batch_size)
        micro_batches = data.draw(st.integers(0, min(room, 6)), label="micro_batches")
        samples, state = run_segment(corpus, state, world_size, micro_batch_size, micro_batches)
        for k, sample in enumerate(samples, start=consumed):
            assert_same(sample, unbroken[k])
        consumed += len(samples)
        assert state["samples_consumed_global"] == consumed


def test_restoring_tokenizes_only_what_comes(corpus: Path) -> None:
    """A resume reads the document a lane stopped in and those after it, nothing consumed before."""
    stream = open_stream(corpus, num_lanes=1)
    samples = iter(stream)
    for _ in range(100):
        next(samples)
    state = stream.state_dict()
    expected = as_arrays(next(samples))

    class Counting(SpanTokenizer):
        texts = 0

        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            self.texts += len(texts)
            return super().encode_batch(texts)

    tokenizer = Counting()
    resumed = PackedStream(StreamSpec(corpus, 16, 3, 1), tokenizer)
    resumed.load_state_dict(state)
    assert tokenizer.texts == 0
    assert_same(as_arrays(next(iter(resumed))), expected)
    assert tokenizer.texts == expected["document_ids"][-1] + 1


def test_iterating_again_goes_on(corpus: Path, unbroken: list[dict[str, np.ndarray]]) -> None:
    stream = open_stream(corpus)
    for k in range(30):
        assert_same(as_arrays(next(iter(stream))), unbroken[k])


def test_seed_and_weights_change_the_order(corpus: Path, unbroken: list[dict[str, np.ndarray]]) -> None:
    for change in ({"seed": 4}, {"weights": {"books": 1.0}}, {"temperature": 5.0}):
        samples = iter(open_stream(corpus, **change))
        rows = [as_arrays(next(samples))["input_ids"] for _ in range(24)]
        assert any((row != sample["input_ids"]).any() for row, sample in zip(rows, unbroken, strict=False)), change


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"world_size": 5}, ["world_size=5", "num_lanes=12", "1, 2, 3, 4, 6, 12"]),
        ({"rank": 2, "world_size": 2}, ["rank=2", "0 to 1"]),
        ({"sequence_length": 0}, ["sequence_length=0"]),
        ({"num_lanes": 0}, ["num_lanes=0"]),
        ({"world_size": 0}, ["world_size=0"]),
    ],
)
def test_shapes_refused(corpus: Path, shape: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        open_stream(corpus, **shape)
    assert all(word in str(caught.value) for word in words), caught.value


def test_torch_workers_refused(corpus: Path) -> None:
    """They would each give the whole stream again, without a word."""
    loader = torch.utils.data.DataLoader(open_stream(corpus), num_workers=1, batch_size=None)
    with pytest.raises(RuntimeError, match=r"(?s)ConfigError.*BatchLoader"):  # torch rewraps what a worker raises
        next(iter(loader))


def test_domains_are_named(corpus: Path) -> None:
    stream = open_stream(corpus, weights={"web": 3, "books": 1})
    assert (stream.domain_names, stream.shares) == (["books", "web"], [0.25, 0.75])


def test_golden_sequence(unbroken: list[dict[str, np.ndarray]]) -> None:
    """Order, mixture and packing in one number: if it changes, runs begun before can no longer be continued exactly."""
    digest = hashlib.sha256()
    for sample in unbroken:
        for name in SAMPLE_COLUMNS:
            digest.update(sample[name].astype("<i8").tobytes())
    assert digest.hexdigest() == "cfef40550e0255714c86e9aa52f65f528bc7e5f68286ae03ec2d96c1c9712e48"
