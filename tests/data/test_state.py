"""The state is small JSON that fits any world size, and stops a run whose data is not the one it began with."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.data.corpus_maker import SpanTokenizer, as_arrays, open_stream, small_corpus, write_corpus
from z2all_ds.data import PackedStream, StreamSpec, merge_states
from z2all_ds.errors import DataError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return small_corpus(tmp_path / "corpus")


def consume(stream: PackedStream, count: int) -> list[list[int]]:
    samples = iter(stream)
    return [as_arrays(next(samples))["input_ids"].tolist() for _ in range(count)]


def rank_states(corpus: Path, world_size: int, samples_per_rank: int) -> list[dict]:
    streams = [open_stream(corpus, rank, world_size) for rank in range(world_size)]
    for stream in streams:
        consume(stream, samples_per_rank)
    return [stream.state_dict() for stream in streams]


def test_fields(corpus: Path) -> None:
    state = open_stream(corpus, rank=1, world_size=4).state_dict()
    assert list(state["lanes"]) == ["1", "5", "9"]
    assert state["lanes"]["1"] == {"drawn": [0, 0, 0], "taken": [0, 0, 0], "current": None}
    del state["lanes"], state["weights"], state["corpus_fingerprint"]
    assert state == {
        "version": 1, "samples_consumed_global": 0, "num_lanes": 12, "sequence_length": 16,
        "tokenizer_fingerprint": "spans", "seed": 3, "domains": ["books", "code", "web"],
    }  # fmt: skip


def test_merged_is_the_state_of_one_rank(corpus: Path) -> None:
    """After 14 samples two lanes are one sample further than the others, whoever read them."""
    (alone,) = rank_states(corpus, 1, 14)
    assert merge_states(rank_states(corpus, 2, 7)) == alone
    assert sorted(sum(lane["taken"]) for lane in alone["lanes"].values()) == [16] * 10 + [32] * 2


def test_small_for_256_lanes_far_into_a_run(tmp_path: Path) -> None:
    """Eight domains, counts as after 10**12 tokens."""
    corpus = write_corpus(tmp_path, {f"domain_{n}": [5, 9] for n in range(8)})
    state = open_stream(corpus, num_lanes=256).state_dict()
    assert json.loads(json.dumps(state)) == state
    for lane in state["lanes"].values():
        lane["drawn"] = [500_000] * 8
        lane["taken"] = [488_281_250] * 8
        lane["current"] = [7, 500_000 * 256, 12_345]
    assert len(json.dumps(state)) < 64 * 1024


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 4}, ["seed was 3 and is 4"]),
        ({"sequence_length": 32}, ["sequence_length was 16 and is 32"]),
        ({"num_lanes": 24}, ["num_lanes was 12 and is 24"]),
        ({"weights": {"web": 1.0}}, ["domains was ['books', 'code', 'web'] and is ['web']", "data.allow_change=true"]),
        ({"temperature": 2.0}, ["weights was [", "data.allow_change=true"]),
        ({"seed": 4, "temperature": 2.0}, ["seed was 3 and is 4", "weights was", "Set it back"]),
    ],
)
def test_changes_are_named(corpus: Path, change: dict, words: list[str]) -> None:
    (state,) = rank_states(corpus, 1, 5)
    stream = open_stream(corpus, **change)
    with pytest.raises(DataError) as caught:
        stream.load_state_dict(state)
    assert all(word in str(caught.value) for word in words), caught.value
    assert stream.state_dict()["samples_consumed_global"] == 0


def test_changed_tokenizer_is_named_and_never_allowed(corpus: Path) -> None:
    (state,) = rank_states(corpus, 1, 5)
    stream = PackedStream(StreamSpec(corpus, 16, 3, 12), SpanTokenizer("other"))
    for allow in (False, True):
        with pytest.raises(DataError, match="tokenizer_fingerprint was spans and is other"):
            stream.load_state_dict(state, allow_data_change=allow)


@pytest.mark.parametrize("change", [{"seed": 4}, {"sequence_length": 32}, {"num_lanes": 24}])
def test_only_data_may_change(corpus: Path, change: dict) -> None:
    (state,) = rank_states(corpus, 1, 5)
    with pytest.raises(DataError, match="Set it back"):
        open_stream(corpus, **change).load_state_dict(state, allow_data_change=True)


def test_changed_corpus_stops_and_can_be_allowed(corpus: Path, tmp_path: Path) -> None:
    (state,) = rank_states(corpus, 1, 30)
    stream = open_stream(write_corpus(tmp_path / "new", {"web": [8] * 50, "wiki": [7] * 50}))
    with pytest.raises(DataError, match=r"corpus_fingerprint was \w{20,}\S* and is \w{20,}.*data.allow_change=true"):
        stream.load_state_dict(state)
    stream.load_state_dict(state, allow_data_change=True)
    after = stream.state_dict()
    assert after["samples_consumed_global"] == 30
    for lane, old in state["lanes"].items():
        assert after["lanes"][lane] == {"drawn": [old["drawn"][2], 0], "taken": [0, 0], "current": None}
    consume(stream, 24)


def test_changed_weights_go_on_in_every_domain(corpus: Path) -> None:
    """No document of `web` comes twice or is lost, and the new domain does not flood the lanes."""
    stream = open_stream(corpus, num_lanes=1, weights={"web": 1.0})
    before = consume(stream, 40)
    changed = open_stream(corpus, num_lanes=1, weights={"code": 1.0, "web": 1.0})
    changed.load_state_dict(stream.state_dict(), allow_data_change=True)
    after = consume(changed, 60)
    web_starts = Counter(t for row in before + after for t in row if t // 1000 >= 45 and t % 1000 == 1)
    assert web_starts
    assert set(web_starts.values()) == {1}
    code_tokens = sum(0 < t // 1000 < 45 for row in after for t in row)
    assert 0.4 < code_tokens / (60 * 16) < 0.55


def test_merge_refuses_what_does_not_belong_together(corpus: Path) -> None:
    states = rank_states(corpus, 3, 4)
    with pytest.raises(DataError, match="no rank's state"):
        merge_states([])
    with pytest.raises(DataError, match=r"lanes \[1, 4, 7, 10\] are missing"):
        merge_states([states[0], states[2]])
    with pytest.raises(DataError, match="given twice"):
        merge_states([states[0], states[1], states[1]])
    with pytest.raises(DataError, match=r"rank 2: samples_consumed_global=15.*rank 0 has 12"):
        merge_states([states[0], states[1], rank_states(corpus, 3, 5)[2]])


def test_own_state_is_enough_at_the_same_shape_only(corpus: Path) -> None:
    state = rank_states(corpus, 3, 4)[1]
    open_stream(corpus, 1, 3).load_state_dict(state)
    with pytest.raises(DataError, match="merge_states"):
        open_stream(corpus, 0, 3).load_state_dict(state)


def test_world_size_must_fit_the_samples(corpus: Path) -> None:
    (state,) = rank_states(corpus, 1, 14)
    with pytest.raises(DataError, match=r"world_size=4: 14 samples .* world sizes: 1, 2\."):
        open_stream(corpus, 0, 4).load_state_dict(state)


def test_document_that_shrank_under_its_fingerprint(corpus: Path) -> None:
    (state,) = rank_states(corpus, 1, 12)
    draw = random.Random(0)
    lane = draw.choice([lane for lane in state["lanes"].values() if lane["current"]])
    lane["current"][2] = 10_000
    stream = open_stream(corpus)
    stream.load_state_dict(state)
    with pytest.raises(DataError, match="stopped after 10000 of its tokens"):
        consume(stream, 12)
