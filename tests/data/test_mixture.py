"""Shares are kept by tokens, from the first batches on; weights that cannot be meant are refused."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpus_maker import open_stream, write_corpus
from z2all_ds.data import tokens_per_domain
from z2all_ds.data.mixture import lane_head_starts, next_domain, resolve_shares
from z2all_ds.errors import ConfigError

SIZES = {"web": 8000, "books": 1000, "code": 1000}


def test_default_shares_are_sizes() -> None:
    assert resolve_shares(None, 1.0, SIZES) == {"books": 0.1, "code": 0.1, "web": 0.8}


def test_temperature_lifts_small_domains() -> None:
    assert resolve_shares(None, 3.0, SIZES) == {"books": 0.25, "code": 0.25, "web": 0.5}
    assert resolve_shares(None, float("inf"), SIZES) == {name: round(1 / 3, 9) for name in sorted(SIZES)}


def test_weights_choose_domains_in_any_unit() -> None:
    assert resolve_shares({"web": 6, "code": 2}, 1.0, SIZES) == {"code": 0.25, "web": 0.75}


@pytest.mark.parametrize(
    ("weights", "temperature", "words"),
    [
        ({"wbe": 1.0}, 1.0, ["'wbe'", "books, code, web"]),
        ({"web": 0.0}, 1.0, ["web=0.0", "above 0"]),
        ({"web": float("nan")}, 1.0, ["web=nan"]),
        ({"web": -1.0}, 1.0, ["web=-1.0"]),
        ({}, 1.0, ["at least one"]),
        ({"web": 1.0}, 2.0, ["temperature=2.0", "not both"]),
        (None, 0.0, ["temperature=0.0"]),
    ],
)
def test_weights_refused(weights: dict | None, temperature: float, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_shares(weights, temperature, SIZES)
    assert all(word in str(caught.value) for word in words), caught.value


def test_ties_go_to_the_first_domain() -> None:
    assert next_domain([0.5, 0.5], [0, 0], [0, 0]) == 0
    assert next_domain([0.5, 0.5], [7, 6], [0, 1]) == 0
    assert next_domain([0.5, 0.5], [7, 6], [0, 0]) == 1


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=6),
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=50),
)
def test_never_more_than_a_document_a_domain_off(weights: list[float], lengths: list[int]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    taken, none = [0] * len(shares), [0] * len(shares)
    for step in range(300):
        taken[next_domain(shares, taken, none)] += lengths[step % len(lengths)]
        for share, count in zip(shares, taken, strict=True):
            assert abs(share * sum(taken) - count) <= max(lengths) * len(shares)


def test_shares_of_a_million_tokens(tmp_path: Path) -> None:
    """Documents of very different length, more asked of the small domains: within 0.5 % of the tokens."""
    corpus = write_corpus(tmp_path, {"books": [900] * 20, "code": [150, 40] * 30, "web": [30, 60, 10] * 40}, 100)
    stream = open_stream(corpus, sequence_length=2048, num_lanes=4, weights={"books": 5, "code": 3, "web": 2})
    samples = iter(stream)
    for _ in range(1_000_000 // 2048 + 1):
        next(samples)
    shares = tokens_per_domain(stream.state_dict())
    assert sum(domain.tokens for domain in shares.values()) >= 1_000_000
    assert {name: domain.asked_share for name, domain in shares.items()} == {"books": 0.5, "code": 0.3, "web": 0.2}
    for name, domain in shares.items():
        assert abs(domain.realised_share - domain.asked_share) < 0.005, (name, domain)


def test_first_batch_is_already_a_mixture(tmp_path: Path) -> None:
    """Without head starts the first documents of all lanes would be of one domain."""
    corpus = write_corpus(tmp_path, {"rare": [100] * 10, "web": [100] * 90}, 1000)
    stream = open_stream(corpus, sequence_length=50, num_lanes=100)
    samples = iter(stream)
    first = [int(next(samples)["domain_ids"][0]) for _ in range(100)]
    assert 4 <= first.count(0) <= 16, first.count(0)


def test_head_starts_are_even_over_the_lanes() -> None:
    starts = [lane_head_starts(lane, 8, 1, ["a", "b"], [16.0, 1600.0]) for lane in range(8)]
    assert sorted(a for a, _ in starts) == [1, 3, 5, 7, 9, 11, 13, 15]
    assert sorted(b for _, b in starts) == [100, 300, 500, 700, 900, 1100, 1300, 1500]
    assert [a * 100 for a, _ in starts] != [b for _, b in starts]
