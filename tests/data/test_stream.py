"""Tests for the order of samples: the same for every world size and number of workers, and after any stop."""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.corpus_maker import SpanTokenizer, as_arrays, assert_same, open_stream, small_corpus, write_corpus
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.data import PackedStream, StageSpec, merge_states
from z2all_ds.data.loader import make_batches
from z2all_ds.data.packing import COLUMNS, NO_TARGET
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
    """Labels cross the end of a sample, but never the end of a document or of a lane's part; domain ids match."""
    for lane in range(NUM_LANES):
        for domain in range(3):  # the samples of one lane and domain form one sequence of documents
            samples = [one for one in unbroken[lane::NUM_LANES] if one["domain_ids"][0] == domain]
            row = np.concatenate([sample["input_ids"] for sample in samples] or [np.zeros(1)])
            labels = np.concatenate([sample["next_tokens"] for sample in samples] or [np.zeros(1)])
            pieces = np.concatenate([sample["document_ids"] for sample in samples] or [np.zeros(1)])
            inside = np.arange(len(row) - 1) % 16 != 15
            continues = np.where(inside, pieces[1:] == pieces[:-1], row[1:] == row[:-1] + 1)
            continues |= ~inside & (row[:-1] != SpanTokenizer.eot_id) & (row[1:] == labels[:-1])  # an <|endoftext|>
            np.testing.assert_array_equal(labels[:-1], np.where(continues, row[1:], NO_TARGET))
    for sample in unbroken:
        assert tuple(sample) == COLUMNS
        texts = sample["input_ids"] != SpanTokenizer.eot_id
        numbers = sample["input_ids"][texts] // 1000
        np.testing.assert_array_equal(sample["domain_ids"][texts], np.searchsorted([5, 45], numbers, side="right"))
        assert (sample["document_ids"][0], sample["position_ids"][0]) == (0, 0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8, 12])
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
    while global_batch > 48:  # keeps the test fast: lanes are up to twice as many
        world_sizes.remove(max(world_sizes))
        global_batch = math.lcm(*world_sizes)
    steps = [data.draw(st.integers(0, max(1, 60 // global_batch)), label="steps") for _ in world_sizes]
    first_stage = data.draw(st.integers(1, 3), label="steps of the first stage") * global_batch
    skip = [
        (first * global_batch, (first + count) * global_batch)
        for first, count in data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2)), max_size=2))
    ]
    spec: dict[str, Any] = {
        "num_lanes": data.draw(st.integers(max(world_sizes), 2 * global_batch + 1), label="lanes"),
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
        micro_batch = data.draw(st.sampled_from(_divisors(global_batch // world_size)), label="micro-batch")
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


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def test_a_run_continues_with_any_world_size_from_any_sample(
    corpus: Path, unbroken: list[dict[str, np.ndarray]]
) -> None:
    """As after the loss of a node: neither the lanes nor the samples consumed are multiples of the new world size."""
    state, at = open_stream(corpus).state_dict(), 0
    for world_size, samples_per_rank in ((4, 7), (7, 5), (5, 9), (12, 3), (1, 2), (11, 4)):
        ranks = [open_stream(corpus, rank, world_size) for rank in range(world_size)]
        for rank in ranks:
            rank.load_state_dict(state)
        samples = [iter(rank) for rank in ranks]
        for k in range(at, at + world_size * samples_per_rank):
            assert_same(as_arrays(next(samples[(k - at) % world_size])), unbroken[k])
        at += world_size * samples_per_rank
        state = json.loads(json.dumps(merge_states([rank.state_dict() for rank in ranks])))
        alone = open_stream(corpus)
        for _, _ in zip(range(at), alone, strict=False):
            pass
        assert state == alone.state_dict()


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


def test_skips_of_a_resume_are_whole_batches_from_its_position_on(
    corpus: Path, unbroken: list[dict[str, np.ndarray]]
) -> None:
    before = open_stream(corpus)
    samples = iter(before)
    for _ in range(21):
        next(samples)
    spec = replace(before.plan.spec, skip=[(23, 29)])
    resumed = PackedStream(spec, SpanTokenizer(), 1, 2, will_resume=True)
    resumed.load_state_dict(before.state_dict())
    samples = iter(resumed)
    for k in (22, 30, 32):
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
        ({"world_size": 13}, ["world_size=13", "at most num_lanes=12"]),
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


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, "ea84f2f2a6d41ea15977d4f52165c0255fec10eca33ef778d0a0511b526d52ab"),
        ({"even_epochs": False}, "4e53f187d6f29a102e0a10901695f67bc6f4f356f549917b1b1c7ca854f147ab"),
        ({"packing": "best_fit"}, "12819ef03adf0af70f55ce93b4778173c88ab7099bd2bc312f0eb08b980cab0b"),
    ],
)
def test_the_sequence_is_that_of_earlier_versions(corpus: Path, spec: dict, expected: str) -> None:
    """The hash covers order, mixture and packing: if it changes, existing runs can no longer be continued exactly."""
    digest, samples = hashlib.sha256(), iter(open_stream(corpus, **spec))
    for _ in range(UNBROKEN_SAMPLES):
        sample = as_arrays(next(samples))
        for name in COLUMNS:
            digest.update(sample[name].astype("<i8").tobytes())
    assert digest.hexdigest() == expected


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_a_begin_of_text_token_is_put_before_every_document(tmp_path: Path, packing: str) -> None:
    lengths = [3, 0, 5, 20, 1]
    corpus = write_corpus(tmp_path, {"web": lengths})
    stream = open_stream(corpus, packing=packing, begin_of_text=True, num_lanes=1, sequence_length=8)
    samples = iter(stream)
    tokens = sum(length + 2 for length in lengths)
    row: list[int] = []
    while len(row) < 2 * tokens:
        row += next(samples)["input_ids"].tolist()
    begins = [number for number, token in enumerate(row) if token == 7]
    assert begins[0] == 0 and len(begins) >= len(lengths)
    # After an <|endoftext|>; best_fit may also put a sample after the middle of a long document.
    assert all(row[number - 1] == 0 or (packing == "best_fit" and number % 8 == 0) for number in begins[1:])
    state = stream.state_dict()
    assert state["begin_of_text"]
    with pytest.raises(DataError, match="begin_of_text was True and is False"):
        open_stream(corpus, packing=packing, num_lanes=1, sequence_length=8).load_state_dict(state)
    again = open_stream(corpus, packing=packing, begin_of_text=True, num_lanes=1, sequence_length=8)
    again.load_state_dict(state)
    assert_same(next(iter(again)), next(samples))


@pytest.mark.parametrize("tokenizer_does_so", [False, True])
def test_by_default_documents_begin_as_the_tokenizer_begins_texts(
    tmp_path: Path, tokenizer_does_so: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpanTokenizer, "begins_texts", tokenizer_does_so)
    stream = open_stream(write_corpus(tmp_path, {"web": [3] * 4}), begin_of_text=None, num_lanes=1, sequence_length=8)
    assert (7 in next(iter(stream))["input_ids"]) == tokenizer_does_so
    assert stream.state_dict()["begin_of_text"] == tokenizer_does_so


@pytest.mark.parametrize(("packing", "tolerance"), [("cut", 1e-9), ("best_fit", 0.1)])
@pytest.mark.parametrize("lengths", [[5000, *[7] * 99], [400] * 16, [0] * 50 + [100] * 20])
def test_epochs_are_the_tokens_read_over_those_of_the_domain(
    tmp_path: Path, lengths: list[int], packing: str, tolerance: float
) -> None:
    corpus = write_corpus(tmp_path, {"web": lengths})
    stream = open_stream(corpus, packing=packing, num_lanes=16, sequence_length=8)
    samples, of_domain = iter(stream), sum(lengths) + len(lengths)
    rounds = 3 * of_domain // (16 * 8)
    for number in range(1, rounds + 1):
        for _ in range(16):
            next(samples)
        if number % max(1, rounds // 8) == 0:
            read = number * 16 * 8 / of_domain
            assert stream.epochs_read() == {"web": pytest.approx(read, rel=tolerance)}
