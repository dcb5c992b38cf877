"""Tests for the order of samples: the same for every world size and number of workers, and after any stop."""

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.corpus_maker import SpanTokenizer, as_arrays, assert_same, open_stream, small_corpus, write_corpus
from z2all_ds.base.errors import ConfigError
from z2all_ds.data import PackedStream, StageSpec, merge_states
from z2all_ds.data.loader import make_batches
from z2all_ds.data.packing import COLUMNS, NO_TARGET
from z2all_ds.data.state import divisors
from z2all_ds.data.stream import Produced

NUM_LANES = 12
UNBROKEN_SAMPLES = 400


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def unbroken(corpus: Path) -> list[dict[str, np.ndarray]]:
    """Return the global sequence of one rank that never stops."""
    samples = iter(open_stream(corpus))
    return [as_arrays(next(samples)) for _ in range(UNBROKEN_SAMPLES)]


def test_labels_and_domain_ids_match_the_documents(unbroken: list[dict[str, np.ndarray]]) -> None:
    """Labels cross the end of a sample, but never the end of a document; domain ids match the tokens."""
    for lane in range(NUM_LANES):
        for domain in range(3):  # the samples of one lane and domain form one sequence of documents
            samples = [one for one in unbroken[lane::NUM_LANES] if one["domain_ids"][0] == domain]
            row = np.concatenate([sample["input_ids"] for sample in samples] or [np.zeros(1)])
            labels = np.concatenate([sample["labels"] for sample in samples] or [np.zeros(1)])
            expected = np.where(row[:-1] == SpanTokenizer.eot_id, NO_TARGET, row[1:])
            np.testing.assert_array_equal(labels[:-1], expected)
    for sample in unbroken:
        assert tuple(sample) == COLUMNS
        texts = sample["input_ids"] != SpanTokenizer.eot_id
        numbers = sample["input_ids"][texts] // 1000
        np.testing.assert_array_equal(sample["domain_ids"][texts], np.searchsorted([5, 45], numbers, side="right"))
        assert (sample["document_ids"][0], sample["position_ids"][0]) == (0, 0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_every_world_size_produces_the_same_sequence(
    corpus: Path, unbroken: list[dict[str, np.ndarray]], world_size: int
) -> None:
    ranks = [iter(open_stream(corpus, rank, world_size)) for rank in range(world_size)]
    for k in range(144):
        assert_same(as_arrays(next(ranks[k % world_size])), unbroken[k])


def in_turn(stream: PackedStream, num_workers: int) -> Iterator[Produced | None]:
    """Interleave the samples of the rank's workers as the loader does."""
    parts = [stream.produce(worker, num_workers) for worker in range(num_workers)]
    while True:
        for part in parts:
            yield next(part)


def consume(stream: PackedStream, num_workers: int, micro_batch_size: int, count: int) -> list[dict[str, np.ndarray]]:
    """Return the samples of `count` micro-batches of one rank."""
    batches = make_batches(in_turn(stream, max(num_workers, 1)), [micro_batch_size] * 2)
    samples = []
    for _ in range(count):
        batch, consumed = next(batches)
        for produced in consumed:
            stream.mark_consumed(produced)
        samples += [{name: column[row].numpy() for name, column in batch.items()} for row in range(micro_batch_size)]
    return samples


@given(data=st.data())
def test_a_resume_with_any_world_size_workers_and_micro_batch_continues_exactly(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The concatenated samples equal those of one rank without workers that never stopped, token for token.

    Corpora, stages, skips and packing are random, and each resume has its own world size, workers and micro-batch.
    """
    lengths = st.lists(st.integers(0, 40), min_size=1, max_size=60)
    by_domain = data.draw(st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), lengths, min_size=1), label="corpus")
    corpus = write_corpus(tmp_path_factory.mktemp("c"), by_domain, data.draw(st.integers(1, 30), label="shard"))
    world_sizes = data.draw(st.lists(st.integers(1, 16), min_size=2, max_size=4), label="world sizes")
    global_batch = math.lcm(*world_sizes)
    while global_batch > 120:  # keeps the test fast
        world_sizes.remove(max(world_sizes))
        global_batch = math.lcm(*world_sizes)
    steps = [data.draw(st.integers(0, max(1, 60 // global_batch)), label="steps") for _ in world_sizes]
    first_stage = data.draw(st.integers(1, 3), label="steps of the first stage") * global_batch
    skip = [
        (first * global_batch, (first + count) * global_batch)
        for first, count in data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2)), max_size=2))
    ]
    spec: dict[str, Any] = {
        "num_lanes": global_batch * data.draw(st.integers(1, 2), label="lanes"),
        "packing": data.draw(st.sampled_from(["cut", "best_fit"]), label="packing"),
        "stages": (
            StageSpec(data.draw(st.integers(1, 20)), samples=first_stage),
            StageSpec(data.draw(st.integers(1, 20)), temperature=3.0),
        ),
        "skip": skip,
        "seed": data.draw(st.integers(0, 99)),
    }
    expected = consume(open_stream(corpus, **spec), 0, global_batch, sum(steps))

    state, at = None, 0
    for world_size, count in zip(world_sizes, steps, strict=True):
        micro_batch = data.draw(st.sampled_from(divisors(global_batch // world_size)), label="micro-batch")
        per_rank, states = [], []
        for rank in range(world_size):
            stream = open_stream(corpus, rank, world_size, **spec)
            if state is not None:
                stream.load_state_dict(state)
            num_workers = data.draw(st.integers(0, 4), label="workers")
            micro_batches = count * global_batch // (world_size * micro_batch)
            per_rank.append(consume(stream, num_workers, micro_batch, micro_batches))
            states.append(stream.state_dict())
        for number in range(count * global_batch):
            assert_same(per_rank[number % world_size][number // world_size], expected[at + number])
        at += count * global_batch
        state = json.loads(json.dumps(merge_states(states)))
        assert len(json.dumps(state)) < 64 * 1024


def test_skipped_samples_are_the_only_ones_missing(corpus: Path, unbroken: list[dict[str, np.ndarray]]) -> None:
    samples = iter(open_stream(corpus, skip=[(5, 29), (100, 101)]))
    for k in [*range(5), *range(29, 100), *range(101, 300)]:
        assert_same(as_arrays(next(samples)), unbroken[k])


def test_a_skip_added_on_resume_applies_to_later_samples_only(
    corpus: Path, unbroken: list[dict[str, np.ndarray]]
) -> None:
    """Consumed samples stay consumed; ranges stored in the state stay skipped without being configured again."""
    stream = open_stream(corpus)
    samples = iter(stream)
    for _ in range(24):
        next(samples)
    resumed = open_stream(corpus, skip=[(0, 12), (20, 36), (48, 60)])
    resumed.load_state_dict(stream.state_dict())
    samples = iter(resumed)
    for k in range(36, 48):
        assert_same(as_arrays(next(samples)), unbroken[k])
    again = open_stream(corpus)
    again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
    samples = iter(again)
    for k in range(60, 72):
        assert_same(as_arrays(next(samples)), unbroken[k])


def test_a_new_iterator_continues_where_the_last_one_stopped(
    corpus: Path, unbroken: list[dict[str, np.ndarray]]
) -> None:
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
        ({"packing": "worst_fit"}, ["packing='worst_fit'", "cut, best_fit"]),
        ({"world_size": 2, "skip": [(3, 8)]}, ["skip=[3, 8)", "2 ranks"]),
    ],
)
def test_invalid_settings_are_refused(corpus: Path, shape: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        open_stream(corpus, **shape)
    assert all(word in str(caught.value) for word in words), caught.value


def test_workers_of_a_plain_torch_dataloader_are_refused(corpus: Path) -> None:
    """Each worker would return the whole stream."""
    loader = torch.utils.data.DataLoader(open_stream(corpus), num_workers=1, batch_size=None)
    with pytest.raises(RuntimeError, match=r"(?s)ConfigError.*BatchLoader"):  # torch wraps exceptions of a worker
        next(iter(loader))


def test_domain_names_are_sorted_and_only_those_with_weights(corpus: Path) -> None:
    assert open_stream(corpus, weights={"web": 3, "books": 1}).domain_names == ["books", "web"]


def test_the_sequence_is_that_of_earlier_versions(unbroken: list[dict[str, np.ndarray]]) -> None:
    """The hash covers order, mixture and packing: if it changes, existing runs can no longer be continued exactly."""
    digest = hashlib.sha256()
    for sample in unbroken:
        for name in COLUMNS:
            digest.update(sample[name].astype("<i8").tobytes())
    assert digest.hexdigest() == "4e53f187d6f29a102e0a10901695f67bc6f4f356f549917b1b1c7ca854f147ab"
