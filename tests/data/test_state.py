"""Tests for the data state: small JSON that works at any world size and stops a run whose data has changed."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.data.corpus_maker import SpanTokenizer, as_arrays, open_stream, small_corpus, write_corpus
from z2all_ds.base.errors import DataError
from z2all_ds.data import PackedStream, StageSpec, data_plan, merge_states
from z2all_ds.data.documents import RawDomain
from z2all_ds.data.state import data_changes


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return small_corpus(tmp_path / "corpus")


def consume(stream: PackedStream, count: int) -> list[list[int]]:
    samples = iter(stream)
    return [as_arrays(next(samples))["input_ids"].tolist() for _ in range(count)]


def rank_states(corpus: Path, world_size: int, samples_per_rank: int) -> list[Any]:
    streams = [open_stream(corpus, rank, world_size) for rank in range(world_size)]
    for stream in streams:
        consume(stream, samples_per_rank)
    return [stream.state_dict() for stream in streams]


def test_the_fields_of_an_initial_state(corpus: Path) -> None:
    state: Any = open_stream(corpus, rank=1, world_size=4, skip=[(8, 12)]).state_dict()
    assert state.pop("lanes") == {lane: [[0, 0, 0]] * 3 for lane in ("1", "5", "9")}
    assert {name: documents for name, (documents, _, _) in state.pop("domains").items()} == {
        "books": 5, "code": 40, "web": 90
    }  # fmt: skip
    assert list(state["stage"].pop("shares")) == list(state.pop("sizes")) == ["books", "code", "web"]
    assert state == {
        "version": 3, "position": 0, "num_lanes": 12, "seed": 3, "packing": "cut", "tokenizer_fingerprint": "spans",
        "stage": {"name": "0", "sequence_length": 16}, "skip": [[8, 12]], "begin_of_text": False,
        "longest_sample": 16, "padding_lengths": {},
    }  # fmt: skip


def test_merged_states_equal_the_state_of_one_rank(corpus: Path) -> None:
    """After 14 samples, two lanes are one sample ahead of the others."""
    (alone,) = rank_states(corpus, 1, 14)
    assert merge_states(rank_states(corpus, 2, 7)) == alone


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_the_state_is_small_with_256_lanes_late_in_a_run(tmp_path: Path, packing: str) -> None:
    """The state is below 64 KiB with eight domains and the large cursors of a long run over long documents."""
    corpus = write_corpus(tmp_path, {f"domain_{n}": [5, 9] for n in range(8)})
    state = open_stream(corpus, num_lanes=256, packing=packing).state_dict()
    assert json.loads(json.dumps(state)) == state
    cursor = [123_456, 255, 1_234_567] if packing == "cut" else [123_456, 255, 32_768, 31]
    state["lanes"] = {lane: [cursor] * 8 for lane in state["lanes"]}
    assert len(json.dumps(state)) < 64 * 1024


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 4}, ["seed was 3 and is 4", "start a new run"]),
        ({"packing": "best_fit"}, ["packing was cut and is best_fit", "start a new run"]),
        ({"num_lanes": 24}, ["num_lanes was 12 and is 24", "Restore it (data.num_lanes=12)", "start a new run"]),
        ({"sequence_length": 32}, ["sequence_length was 16 and is 32", "data.allow_change=true"]),
        (
            {"weights": {"web": 1.0}},
            ["domain 'books' is missing", "domain 'code' is missing", "data.allow_change=true"],
        ),
        ({"temperature": 2.0}, ["shares was {'books':", "data.allow_change=true"]),
        ({"seed": 4, "temperature": 2.0}, ["seed was 3 and is 4", "shares was", "start a new run"]),
    ],
)
def test_changed_settings_are_reported(corpus: Path, change: dict, words: list[str]) -> None:
    (state,) = rank_states(corpus, 1, 5)
    stream = open_stream(corpus, **change)
    before = stream.state_dict()
    with pytest.raises(DataError) as caught:
        stream.load_state_dict(state)
    assert all(word in str(caught.value) for word in words), caught.value
    assert stream.state_dict() == before


def test_a_changed_tokenizer_is_never_allowed(corpus: Path) -> None:
    (state,) = rank_states(corpus, 1, 5)
    stream = PackedStream(open_stream(corpus).plan.spec, SpanTokenizer("other"))
    for allow in (False, True):
        with pytest.raises(DataError, match="tokenizer_fingerprint was spans and is other"):
            stream.load_state_dict(state, allow_data_change=allow)


@pytest.mark.parametrize("change", [{"seed": 4}, {"num_lanes": 24}, {"packing": "best_fit"}])
def test_allow_data_change_does_not_allow_other_changes(corpus: Path, change: dict) -> None:
    (state,) = rank_states(corpus, 1, 5)
    with pytest.raises(DataError, match=r"Restore it .*to continue"):
        open_stream(corpus, **change).load_state_dict(state, allow_data_change=True)


def test_states_of_other_versions_are_refused(corpus: Path) -> None:
    (state,) = rank_states(corpus, 1, 5)
    with pytest.raises(DataError, match="data state of version 1: this package continues from versions 2 and 3"):
        open_stream(corpus).load_state_dict(state | {"version": 1})


def as_version_2(state: Any) -> Any:
    """Return a state as earlier versions wrote it."""
    domains = {name: identity[:2] for name, identity in state["domains"].items()}
    return json.loads(json.dumps(state | {"version": 2, "domains": domains}))


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_a_run_of_an_earlier_version_continues_under_its_order(corpus: Path, packing: str) -> None:
    old = open_stream(corpus, packing=packing, even_epochs=False)
    consume(old, 30)
    resumed = open_stream(corpus, packing=packing)
    resumed.load_state_dict(as_version_2(old.state_dict()))
    expected = consume(old, 60)
    assert consume(resumed, 60) == expected != consume(open_stream(corpus, packing=packing), 90)[30:]
    again = open_stream(corpus, packing=packing)  # its own states say so too
    again.load_state_dict(resumed.state_dict())
    assert consume(again, 60) == consume(old, 60)


def test_tokens_without_document_sizes_cannot_continue_an_even_order(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_plan, "COUNTED_BYTES", 0)
    (state,) = rank_states(corpus, 1, 5)
    monkeypatch.setattr(RawDomain, "has_sizes", False)
    with pytest.raises(
        DataError, match=r"'code' has tokens of an earlier version \(`z2all corpus tokenize --replace`\)"
    ):
        open_stream(corpus).load_state_dict(state)


def test_a_changed_corpus_is_refused_unless_allowed(tmp_path: Path) -> None:
    old = write_corpus(tmp_path / "old", {"a": [9] * 30, "b": [8] * 30, "c": [7] * 30})
    new = write_corpus(tmp_path / "new", {"a": [9] * 30, "b": [8] * 31, "d": [7] * 30})
    (state,) = rank_states(old, 1, 60)
    stream = open_stream(new)
    with pytest.raises(DataError) as caught:
        stream.load_state_dict(state)
    words = ["'b' has changed (30 documents, now 31)", "'c' is missing", "shares", "data.allow_change=true"]
    assert all(word in str(caught.value) for word in words), caught.value
    assert "'a'" not in str(caught.value).partition("shares")[0]
    stream.load_state_dict(state, allow_data_change=True)
    after = stream.state_dict()
    assert after["position"] == 60
    assert list(after["domains"]) == ["a", "b", "d"]
    assert all(word in "; ".join(data_changes(state, after)) for word in words[:-1])  # the words of the error
    assert data_changes(after, stream.state_dict()) == []
    for lane, cursors in state["lanes"].items():
        assert after["lanes"][lane] == [cursors[0], [0, 0, 0], [0, 0, 0]]
    consume(stream, 24)


def test_changed_text_with_the_same_number_of_documents_is_refused(tmp_path: Path) -> None:
    (state,) = rank_states(write_corpus(tmp_path / "old", {"a": [9] * 30}), 1, 12)
    with pytest.raises(DataError, match=r"domain 'a' has changed \(30 documents, other text\)"):
        open_stream(write_corpus(tmp_path / "new", {"a": [8] * 30})).load_state_dict(state)


def test_a_moved_corpus_continues_with_the_same_samples(corpus: Path, tmp_path: Path) -> None:
    (state,) = rank_states(corpus, 1, 12)
    expected = consume(open_stream(corpus), 36)[12:]
    moved = open_stream(corpus.rename(tmp_path / "elsewhere"))
    moved.load_state_dict(state)
    assert consume(moved, 24) == expected


def test_changed_weights_continue_each_domain_where_it_stopped(corpus: Path) -> None:
    """No document of `web` is repeated or lost, and the new domain gets only its share."""
    stream = open_stream(corpus, num_lanes=1, weights={"web": 1.0})
    before = consume(stream, 40)
    changed = open_stream(corpus, num_lanes=1, weights={"code": 1.0, "web": 1.0})
    changed.load_state_dict(stream.state_dict(), allow_data_change=True)
    after = consume(changed, 60)
    web_starts = Counter(t for row in before + after for t in row if t // 1000 >= 45 and t % 1000 == 1)
    assert web_starts
    assert set(web_starts.values()) == {1}
    assert sum(row[0] // 1000 < 45 for row in after if row[0]) in range(26, 33)


def test_later_stages_may_be_changed_but_not_the_current_one(corpus: Path) -> None:
    first = StageSpec(16, {"web": 1.0}, samples=48)
    stream = open_stream(corpus, stages=(first, StageSpec(16, {"web": 1.0})))
    consume(stream, 24)
    state = stream.state_dict()
    later = (first, StageSpec(20, {"web": 1.0, "code": 1.0}, samples=12), StageSpec(32, {"code": 1.0}))
    resumed = open_stream(corpus, stages=later)
    resumed.load_state_dict(state)
    rows = consume(resumed, 60)
    assert [len(row) for row in rows] == [16] * 24 + [20] * 12 + [32] * 24
    with pytest.raises(DataError, match="sequence_length was 16 and is 8"):
        open_stream(corpus, stages=(StageSpec(8, {"web": 1.0}, samples=48), *later[1:])).load_state_dict(state)


def test_merge_refuses_incomplete_or_different_states(corpus: Path) -> None:
    states = rank_states(corpus, 3, 4)
    with pytest.raises(DataError, match="no state to merge"):
        merge_states([])
    with pytest.raises(DataError, match=r"lanes \[1, 4, 7, 10\] are missing"):
        merge_states([states[0], states[2]])
    with pytest.raises(DataError, match=r"lanes \[2, 5, 8, 11\] are missing"):
        merge_states([states[0], states[1], states[1]])
    with pytest.raises(DataError, match=r"rank 2: position=15.*rank 0 has 12"):
        merge_states([states[0], states[1], rank_states(corpus, 3, 5)[2]])


def test_a_rank_may_load_its_own_unmerged_state_but_not_that_of_another_rank(corpus: Path) -> None:
    state = rank_states(corpus, 3, 4)[1]
    open_stream(corpus, 1, 3).load_state_dict(state)
    with pytest.raises(DataError, match="merge_states"):
        open_stream(corpus, 0, 3).load_state_dict(state)
